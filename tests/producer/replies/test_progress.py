"""Progress display of a map."""

from __future__ import annotations

import pytest

from penstock.producer.progress import BulkProgress, ignore, shown

HALF = BulkProgress(total=4, done=2, failed=1, in_flight=2, completion_tokens=7, elapsed_s=0.5)


def test_the_rate_counts_what_is_done() -> None:
    assert HALF.rate == 4.0
    assert BulkProgress().rate == 0.0


def test_a_function_is_called_and_nothing_shown(capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[BulkProgress] = []
    with shown(seen.append) as report:
        report(HALF)
    assert seen == [HALF]
    assert capsys.readouterr() == ("", "")


def test_nothing_is_shown_unless_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    with shown(progress=False) as report:
        assert report is ignore
        report(HALF)
    assert capsys.readouterr() == ("", "")


def test_a_bar_shows_counts_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    with shown(progress=True) as report:
        report(HALF)
    out, err = capsys.readouterr()
    assert out == ""
    assert "2/4" in err
    assert "4.0/s, 2 in flight, 1 failed" in err
