"""Compiles the functions of a plan in turn, or in parallel processes.

Threads would share what a process has imported and traced, but libtpu has crashed when two of them compiled at once.
Each process lays the model out for itself, because abstract arrays and devices cannot be sent to it: that takes
seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing import get_context

from penstock.engine.config import EngineConfig
from penstock.engine.errors import EngineError
from penstock.engine.models import ModelConfig
from penstock.engine.progress import ReportProgress
from penstock.tools.plan.device.compiling import Bucket, Compiler
from penstock.tools.plan.layout import lay_out

_Function = tuple[str, int]
"""Kind and size of a function."""


@dataclass(frozen=True)
class PlanInputs:
    """Everything that a layout depends on."""

    model: ModelConfig
    topology: str
    config: EngineConfig


def compiled_in_turn(
    compiler: Compiler, functions: Sequence[_Function], progress: ReportProgress | None
) -> tuple[Bucket, ...]:
    """Compiles one after another. Raises ConfigError if one does not fit the device's memory."""
    made: list[Bucket] = []
    for kind, size in functions:
        _report(progress, len(made), len(functions), (kind, size))
        made.append(compiler.compile(kind, size))
    return tuple(made)


def compiled_by_processes(
    source: PlanInputs, functions: Sequence[_Function], processes: int, progress: ReportProgress | None
) -> tuple[Bucket, ...]:
    """Compiles the functions in at most `processes` processes.

    If one fails, the others' results up to then are kept if the config says so.

    Raises:
        ConfigError: a function does not fit the device's memory.
        EngineError: a process ended before its function was compiled.
    """
    made: dict[_Function, Bucket] = {}
    count = min(processes, len(functions))
    with ProcessPoolExecutor(count, get_context("spawn")) as pool:
        largest_first = sorted(functions, key=lambda function: function[1], reverse=True)
        jobs = {pool.submit(_compile, source, *function): function for function in largest_first}
        try:
            for job in as_completed(jobs):
                made[jobs[job]] = job.result()
                _report(progress, len(made), len(functions), jobs[job])
        except BrokenProcessPool as error:
            raise EngineError(
                f"one of {count} compiling processes was killed, perhaps for lack of memory, or crashed: try fewer"
            ) from error
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
    return tuple(made[function] for function in functions)


def _report(progress: ReportProgress | None, done: int, count: int, function: _Function) -> None:
    if progress is not None:
        progress(done, count, f"{function[0]} of {function[1]}")


def _compile(source: PlanInputs, kind: str, size: int) -> Bucket:
    return _compiler(source).compile(kind, size)


@lru_cache(maxsize=1)
def _compiler(source: PlanInputs) -> Compiler:
    return lay_out(source.model, source.topology, source.config).compiler
