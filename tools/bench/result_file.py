"""Reads and writes the file of a benchmark (`--json`): its figures, its machine, and when each request got which
tokens.

The last part is `timelines`: for each run a list of requests, one a line, in milliseconds from the run's start.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from penstock.protocol.wire.values import explain
from penstock.tools.bench.errors import BadResult, ImpossibleLoad
from penstock.tools.bench.recorder import Recorder, Timeline
from penstock.tools.bench.summary import Summary, Target, median_run


@dataclass(frozen=True, slots=True)
class Result:
    """Contents of a file. `runs` are summed up again from the deliveries."""

    path: Path
    title: str
    options: Mapping[str, Any]
    load: Mapping[str, Any]
    machine: Mapping[str, Any]
    recorders: tuple[Recorder, ...]
    cpu_s: tuple[float, ...]
    target: Target
    runs: tuple[Summary, ...]

    @property
    def median(self) -> int:
        """Index of the run whose latencies are shown."""
        return median_run(self.runs)


def result_text(figures: Mapping[str, Any], recorders: Sequence[Recorder]) -> str:
    """Makes the text: `figures`, and the timelines behind them, one request a line."""
    head = json.dumps(figures, indent=1).removesuffix("\n}")
    runs = ",\n".join(
        "  [\n" + ",\n".join(f"   {_text_of(line, recorder.start_s)}" for line in recorder.timelines) + "\n  ]"
        for recorder in recorders
    )
    return f'{head},\n "timelines": [\n{runs}\n ]\n}}\n'


def read_result(path: Path) -> Result:
    """Reads a file. Raises BadResult: it can't be read, or is not from `penstock bench --json`."""
    try:
        file = _File.model_validate(json.loads(path.read_text(encoding="utf-8")))
        options = file.options
        target = Target(options.get("slo_ttft_ms"), options.get("slo_itl_ms"))
    except (OSError, UnicodeDecodeError) as error:
        raise BadResult(path, f"it cannot be read: {error}") from error
    except ValidationError as error:
        raise BadResult(path, f"not a result of penstock bench that can be compared: {explain(error)}") from None
    except ImpossibleLoad as error:
        raise BadResult(path, f"options: {error}") from None
    except (ValueError, RecursionError) as error:
        raise BadResult(path, f"not JSON: {error}") from None
    recorders = tuple(_recorder(lines) for lines in file.timelines)
    cpu_s = tuple(run.cpu_s for run in file.runs)
    runs = tuple(Summary.of(recorder, target) for recorder in recorders)
    return Result(path, file.title, options, file.load or {}, file.machine, recorders, cpu_s, target, runs)


def _text_of(line: Timeline, start_s: float) -> str:
    fields = {
        "arrival_ms": _ms(line.arrival_s - start_s),
        "stamps_ms": [_ms(stamp_s - start_s) for stamp_s in line.stamps_s],
        "counts": line.counts,
        "end_ms": None if line.end_s is None else _ms(line.end_s - start_s),
        "num_prompt": line.num_prompt,
        "finish_reason": line.finish_reason,
        "error": line.error,
    }
    return json.dumps({name: value for name, value in fields.items() if value is not None}, separators=(",", ":"))


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)


class _Line(BaseModel):
    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    arrival_ms: float
    stamps_ms: list[float]
    counts: list[int]
    end_ms: float | None = None
    num_prompt: int = Field(ge=0)
    finish_reason: str | None = None
    error: str | None = None

    @model_validator(mode="after")
    def _is_in_order(self) -> _Line:
        moments = [self.arrival_ms, *self.stamps_ms, *([] if self.end_ms is None else [self.end_ms])]
        if len(self.counts) != len(self.stamps_ms) or min(self.counts, default=1) < 1:
            raise ValueError(f"{len(self.stamps_ms)} deliveries have the counts {self.counts[:5]}")
        if moments[1:] != sorted(moments[1:]):
            raise ValueError("its deliveries are not in the order of time")
        return self


class _Run(BaseModel):
    cpu_s: float


class _File(BaseModel):
    title: str
    options: dict[str, Any]
    load: dict[str, Any] | None = None
    machine: dict[str, Any]
    runs: list[_Run]
    timelines: list[list[_Line]] = Field(min_length=1)

    @model_validator(mode="after")
    def _is_whole(self) -> _File:
        if len(self.runs) != len(self.timelines) or not all(self.timelines):
            raise ValueError(f"{len(self.runs)} runs have the timelines of {len(self.timelines)}, or one has none")
        return self


def _recorder(lines: Sequence[_Line]) -> Recorder:
    recorder = Recorder(start_s=0.0)
    recorder.timelines = [
        Timeline(
            line.arrival_ms / 1000,
            [stamp_ms / 1000 for stamp_ms in line.stamps_ms],
            list(line.counts),
            None if line.end_ms is None else line.end_ms / 1000,
            line.num_prompt,
            line.finish_reason,
            line.error,
        )
        for line in lines
    ]
    return recorder
