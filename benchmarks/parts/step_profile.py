"""Shows where the time of steps goes, operation by operation, from XLA's profiler.

    python -m benchmarks.engine --model tiny --dtype bfloat16 --profile

An operation is timed on the thread that runs it; C++ code, and operations that XLA divides, use others meanwhile.
Tracing makes short operations longer, so read the shares.
"""

from __future__ import annotations

import re
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import jax

from penstock.engine import Engine

_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%(?P<name>[\w.-]+) = (?P<shape>\(.*?\)|\S+) (?P<opcode>[\w-]+)\(")
_WIDTH = re.compile(r"^\w+\[(?:\d+,)*(\d+)\]")  # of an array's last axis
_TARGET = re.compile(r'custom_call_target="([^"]+)"')
_SOURCE = re.compile(r'metadata=\{op_name="([^"]+)"')
_DIVIDED = re.compile(r'"outer_dimension_partitions":\["')
_CONTAINERS = ("while", "conditional", "call")  # their contents are timed separately

Key = TypeVar("Key")


@dataclass(frozen=True, slots=True)
class Kind:
    """Kind of an operation: who computes it, on how many threads, and what it is."""

    where: str
    what: str


@dataclass(frozen=True, slots=True)
class Event:
    """One operation of one run of a program."""

    module: str
    run: tuple[int, int]
    operation: str
    start_ns: float
    duration_ns: float

    @property
    def end_ns(self) -> float:
        return self.start_ns + self.duration_ns


@dataclass(frozen=True, slots=True)
class Program:
    """A compiled part of steps."""

    title: str
    module: str
    kinds: Mapping[str, Kind]  # by operation


@dataclass(frozen=True, slots=True)
class Profile:
    """Tables, and the share of time in which no operation ran."""

    programs: list[dict[str, Any]]
    places: list[dict[str, Any]]
    operations: list[dict[str, Any]]
    idle_share: float


def profiled(engine: Engine, run: Callable[[], object]) -> Profile:
    """Profiles the engine's device during `run`. Everything must be compiled already."""
    with tempfile.TemporaryDirectory() as folder:
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0
        with _recorded(engine) as programs, jax.profiler.trace(folder, profiler_options=options):
            run()
        (file,) = Path(folder).rglob("*.xplane.pb")
        return summarized(list(_events(jax.profiler.ProfileData.from_file(str(file)))), programs)


def kinds_of(hlo: str) -> dict[str, Kind]:
    """Returns by name the operations of a compiled program's text that take time of their own."""
    found = {}
    for line in hlo.splitlines():
        match = _INSTRUCTION.match(line)
        if match is None or match["opcode"] in _CONTAINERS:
            continue
        target, source = _TARGET.search(line), _SOURCE.search(line)
        what = source[1].rsplit("/", 1)[-1] if source else match["name"].split(".")[0]
        if target:
            width = _WIDTH.match(match["shape"])
            found[match["name"]] = Kind("C++", f"{target[1]} to {width[1]}" if width else target[1])
        else:
            found[match["name"]] = Kind("XLA, divided" if _DIVIDED.search(line) else "XLA, one thread", what)
    return found


def summarized(events: list[Event], programs: list[Program]) -> Profile:
    """Sums up. `programs`: one per dispatch, in order; the k-th run of a module is its k-th dispatch."""
    program_of = _matched(events, programs)
    by_kind: defaultdict[Kind, float] = defaultdict(float)
    calls: Counter[Kind] = Counter()
    by_program: defaultdict[str, float] = defaultdict(float)
    timed = []
    for event in events:
        program = program_of.get(event.run)
        kind = None if program is None else program.kinds.get(event.operation)
        if program is None or kind is None:
            continue
        timed.append(event)
        by_kind[kind] += event.duration_ns
        calls[kind] += 1
        by_program[program.title] += event.duration_ns
    runs = Counter(program.title for program in program_of.values())
    total_ns, num_steps = sum(by_kind.values()), max(Counter(each.module for each in programs).values(), default=1)
    by_place: defaultdict[str, float] = defaultdict(float)
    for kind, time_ns in by_kind.items():
        by_place[kind.where] += time_ns
    return Profile(
        [
            {"program": title, "runs": runs[title], "ms per run": time_ns / runs[title] / 1e6,
             "share": time_ns / total_ns}
            for title, time_ns in _most_first(by_program)
        ],
        [
            {"computed by": place, "ms per step": time_ns / num_steps / 1e6, "share": time_ns / total_ns}
            for place, time_ns in _most_first(by_place)
        ],
        [
            {"computed by": kind.where, "operation": kind.what, "calls per step": calls[kind] / num_steps,
             "ms per step": time_ns / num_steps / 1e6, "share": time_ns / total_ns}
            for kind, time_ns in _most_first(by_kind)[:25]
        ],
        _idle_share(timed),
    )  # fmt: skip


def _most_first(amounts: Mapping[Key, float]) -> list[tuple[Key, float]]:
    return sorted(amounts.items(), key=lambda item: item[1], reverse=True)


def _matched(events: Iterable[Event], programs: Iterable[Program]) -> dict[tuple[int, int], Program]:
    starts: dict[str, dict[tuple[int, int], float]] = {}
    for event in events:
        runs = starts.setdefault(event.module, {})
        runs[event.run] = min(event.start_ns, runs.get(event.run, event.start_ns))
    dispatches: dict[str, list[Program]] = {}
    for program in programs:
        dispatches.setdefault(program.module, []).append(program)
    return {
        run: program
        for module, runs in starts.items()
        for run, program in zip(sorted(runs, key=runs.__getitem__), dispatches.get(module, []), strict=False)
    }


def _idle_share(events: list[Event]) -> float:
    """Returns the share of time, from first to last operation, in which none ran."""
    busy_ns, until_ns = 0.0, 0.0
    for event in sorted(events, key=lambda event: event.start_ns):
        busy_ns += max(0.0, event.end_ns - max(until_ns, event.start_ns))
        until_ns = max(until_ns, event.end_ns)
    whole_ns = until_ns - min((event.start_ns for event in events), default=0.0)
    return 1 - busy_ns / whole_ns if whole_ns else 0.0


def _events(data: Any) -> Iterator[Event]:
    for plane in data.planes:
        for line in plane.lines:
            for event in line.events:
                stats = dict(event.stats)
                if "hlo_op" in stats and "run_id" in stats:
                    run = stats["program_id"], stats["run_id"]
                    yield Event(stats["hlo_module"], run, stats["hlo_op"], event.start_ns, event.duration_ns)


class _recorded:  # noqa: N801 - reads as a function
    """Records the programs that the engine's runner takes, in order."""

    def __init__(self, engine: Engine) -> None:
        self._runner: Any = engine._runner  # noqa: SLF001
        self._known: dict[int, Program] = {}
        self._found: list[Program] = []

    def __enter__(self) -> list[Program]:
        for name, title in (("_backbone", "{} tokens"), ("_head", "head, {} rows"), ("_loop", "{} rows, {} steps")):
            setattr(self._runner, name, self._recording(getattr(self._runner, name), title))
        return self._found

    def __exit__(self, *_: object) -> None:
        for name in ("_backbone", "_head", "_loop"):
            delattr(self._runner, name)

    def _recording(self, take: Callable[..., Any], title: str) -> Callable[..., Any]:
        def taken(*arguments: Any) -> Any:
            compiled = take(*arguments)
            if id(compiled) not in self._known:
                hlo = compiled.as_text()
                module = hlo.split(",", 1)[0].removeprefix("HloModule ")
                self._known[id(compiled)] = Program(title.format(*arguments), module, kinds_of(hlo))
            self._found.append(self._known[id(compiled)])
            return compiled

        return taken
