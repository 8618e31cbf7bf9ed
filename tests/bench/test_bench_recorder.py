"""Recording of a delivery."""

from __future__ import annotations

from penstock.tools.bench.recorder import Timeline, note


def test_deliveries_without_tokens_do_not_count() -> None:
    line = Timeline(0.0)
    note(line, 0, 1.0)
    note(line, 2, 3.0)
    assert (line.stamps_s, line.num_output) == ([3.0], 2)
