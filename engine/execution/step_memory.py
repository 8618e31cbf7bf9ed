"""Keeps what warm-up measured next to the compilations, so that the next start need not measure again.

It holds for one machine, model, set of shapes and version of the code: any other has a file of its own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from penstock.engine import kept_files
from penstock.engine.execution.kept_keys import key_of
from penstock.engine.scheduling.pace import StepTimes

_FOLDER = "step_times"


@dataclass(frozen=True, slots=True)
class Measured:
    """Step times, and the decision drawn from them: decode steps in one dispatch, by row bucket."""

    times: StepTimes
    loops: Mapping[int, int]


class StepMemory:
    """A file in `directory`, or none. `facts` are what step times depend on, apart from the machine and the code."""

    def __init__(self, directory: Path | None, *facts: object) -> None:
        self._path: Path | None = None
        if directory is not None:
            self._path = directory / _FOLDER / f"{key_of(*facts)}.json"

    def recall(self) -> Measured | None:
        """Returns what was kept last; None if there is nothing readable."""
        if self._path is None:
            return None
        try:
            kept = json.loads(kept_files.recall(self._path) or b"")
            times = StepTimes(
                _read_buckets(kept["prompt_s"]), _read_buckets(kept["decode_s"]), float(kept["pair_s"]),
                _read_buckets(kept["few_s"]),
            )  # fmt: skip
            return Measured(times, {int(rows): int(steps) for rows, steps in kept["loops"].items()})
        except (ValueError, KeyError, TypeError, AttributeError):
            return None

    def keep(self, measured: Measured) -> None:
        """Writes the file atomically. An unwritable folder only costs the next start its time."""
        if self._path is None:
            return
        times = measured.times
        kept = {
            "prompt_s": times.prompt_s, "decode_s": times.decode_s, "few_s": times.few_s, "pair_s": times.pair_s,
            "loops": measured.loops,
        }  # fmt: skip
        kept_files.keep_if_possible(self._path, json.dumps(kept).encode())


def _read_buckets(kept: Mapping[str, float]) -> dict[int, float]:
    return {int(bucket): float(seconds) for bucket, seconds in kept.items()}
