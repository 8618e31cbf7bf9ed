"""Progress display of a map."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.producer.progress import REDRAW_S, BulkProgress, has_viewer, ignore, shown

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


class ZMQInteractiveShell:
    """Stands in for the shell of a Jupyter kernel."""


def test_a_notebook_without_widgets_gets_a_line_that_is_drawn_over(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not has_viewer()
    monkeypatch.setattr("builtins.get_ipython", ZMQInteractiveShell, raising=False)
    monkeypatch.setattr("penstock.producer.progress.find_spec", lambda name: None)
    assert has_viewer()
    with shown(progress=True) as report:
        report(HALF)
        report(replace(HALF, done=3, elapsed_s=HALF.elapsed_s + REDRAW_S / 2))  # too soon to be drawn
        report(replace(HALF, total=None, elapsed_s=30))
        report(replace(HALF, done=4, elapsed_s=3600))
    out, err = capsys.readouterr()
    assert out == ""
    before, half, unknown, end = (line.rstrip() for line in err.split("\r"))
    assert before == ""
    assert half == f"[{'#' * 15}{'.' * 15}] 2/4 4.0/s, 2 in flight, 1 failed 0:00:00, 0:00:00 left"
    assert unknown == f"[{'.' * 30}] 2/? 0.1/s, 2 in flight, 1 failed 0:00:30"
    assert end == f"[{'#' * 30}] 4/4 0.0/s, 2 in flight, 1 failed 1:00:00"
    assert err.endswith("\n")
