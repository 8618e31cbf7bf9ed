"""Bits are equal where the table of docs/guarantees.md says so.

`python -m tests.engine.whole.test_engine_arithmetics` prints the table.
"""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.engine import Engine, EngineConfig, Request, SamplingParams
from penstock.engine.arithmetic import arithmetic_of
from penstock.engine.stats import EngineInfo
from tests.engine.engines import SMALL, VOCAB_SIZE, drive
from tests.support.needs import needs_compiler
from tests.support.packages import ROOT
from tests.support.patience import slow

GUARANTEES = ROOT / "docs/guarantees.md"
INFO = EngineInfo(1, "float32", "float32", 64, 4096, 4096, "cpu", "cpu", 1, "native", "native", None, VOCAB_SIZE)
NATIVE = replace(INFO, batch_invariant=True)
XLA = replace(INFO, attention="xla", matmul="xla")
EQUAL, BY_BATCH, ANOTHER = "equal bits", "by batch", "another"


@dataclass(frozen=True)
class Pair:
    """What the second engine of a pair has that the first has not."""

    what: str
    setting: dict[str, Any]
    info: dict[str, Any]  # the facts that follow from it

    def cell(self, info: EngineInfo) -> str:
        """Returns what the table says of the pair whose first engine has these facts."""
        other = replace(info, **self.info)
        if arithmetic_of(info, SMALL) != arithmetic_of(other, replace(SMALL, **self.setting)):
            return ANOTHER
        return EQUAL if info.batch_invariant and other.batch_invariant else BY_BATCH


def _setting(name: str, value: Any) -> Pair:
    return Pair(f"`{name}`", {name: value}, {})


OF_STEPS = (
    _setting("decode_steps", 8), _setting("max_batch_tokens", 32), _setting("max_num_seqs", 3),
    _setting("page_size", 8), _setting("speculation", "off"), _setting("max_draft_tokens", 3),
    _setting("prefix_caching", False), _setting("prefill_share", 0.1),
)  # fmt: skip
"""Settings that decide what a step computes together."""

NOT_NATIVE: dict[str, Any] = {"batch_invariant": False}
OTHERS = (
    Pair("`attention`", {"attention": "xla"}, {"attention": "xla", **NOT_NATIVE}),
    Pair("`matmul`", {"matmul": "xla"}, {"matmul": "xla", **NOT_NATIVE}),
    Pair("`dtype`", {"dtype": "bfloat16"}, {"dtype": "bfloat16", "kv_dtype": "bfloat16"}),
    Pair("`kv_cache_dtype`", {"kv_cache_dtype": "int8"}, {"kv_dtype": "int8"}),
    Pair("`tensor_parallel`", {"tensor_parallel": 2}, {"num_devices": 2, "matmul": "xla", **NOT_NATIVE}),
    Pair("`same_tokens`", {"same_tokens": False}, {}),
)
PAIRS = (*OF_STEPS, *OTHERS)
COLUMNS = {"C++ (`native`)": NATIVE, "XLA": XLA}
_XLA_HAS = {"`attention`": "native", "`matmul`": "native"}


def table() -> str:
    """Returns the table as it is in docs/guarantees.md."""
    lines = [f"| two workers that differ in | {' | '.join(COLUMNS)} |", "| --- | --- | --- |"]
    rows: dict[tuple[str, ...], list[str]] = {}
    for pair in PAIRS:
        cells = pair.cell(NATIVE), ANOTHER if pair.what in _XLA_HAS else pair.cell(XLA)
        rows.setdefault(cells, []).append(pair.what)
    rows.setdefault(_cells_of_threads(), []).append("the number of threads")
    rows.setdefault((ANOTHER, ANOTHER), []).append("the kind of processor or device, the version")
    lines += [f"| {', '.join(names)} | {' | '.join(cells)} |" for cells, names in rows.items()]
    return "\n".join(lines) + "\n"


def _cells_of_threads() -> tuple[str, str]:
    with pytest.MonkeyPatch.context() as patch:
        found = []
        for info in COLUMNS.values():
            named = []
            for count in (2, 4):
                patch.setattr("penstock.engine.arithmetic.num_processors", lambda count=count: count)
                named.append(arithmetic_of(info, SMALL))
            found.append(ANOTHER if named[0] != named[1] else EQUAL)
    return found[0], found[1]


def test_the_page_has_the_table() -> None:
    assert table() in GUARANTEES.read_text()


def requests(seed: int = 5) -> list[Request]:
    rng = np.random.default_rng(seed)
    return [
        Request(
            f"r{i}",
            tuple(map(int, rng.integers(0, VOCAB_SIZE, length))),
            SamplingParams(temperature=0.7 * (i % 2), seed=i, max_tokens=9, logprobs=1, ignore_eos=True),
            n=1 + i % 2,
        )
        for i, length in enumerate((1, 33, 50))
    ]


def bits(engine: Engine) -> dict[tuple[str, int], list[tuple[int, float]]]:
    return {
        name: [(entry.token_id, entry.logprob) for entry in result.logprobs]
        for name, result in drive(engine, requests()).items()
    }


def loaded(model: Path, config: EngineConfig) -> Engine:
    return Engine.from_checkpoint(model, replace(config, attention="native", matmul="native"))


ALL_AT_ONCE: dict[str, Any] = {name: value for pair in OF_STEPS for name, value in pair.setting.items()}


@needs_compiler
@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(
    ("dtype", "setting"),
    [
        ("float32", ALL_AT_ONCE),
        slow("bfloat16", ALL_AT_ONCE),
        *(slow(dtype, pair.setting) for dtype in ("float32", "bfloat16") for pair in OF_STEPS),
    ],
    ids=str,
)
def test_what_is_called_equal_is_equal(tiny_model: Path, dtype: str, setting: dict[str, Any]) -> None:
    """Where one engine is the other but for what a step computes together, all its bits are the other's."""
    one, other = (loaded(tiny_model, replace(SMALL, dtype=dtype, **more)) for more in ({}, setting))
    assert one.describe().batch_invariant
    assert one.describe().arithmetic == other.describe().arithmetic
    assert bits(one) == bits(other)


@pytest.mark.parametrize("pair", [pair for pair in OTHERS if pair.what in ("`attention`", "`matmul`", "`dtype`")])
def test_what_is_called_another_is_named_otherwise(tiny_model: Path, pair: Pair) -> None:
    native = {"attention": "native", "matmul": "native"}
    one, other = (
        Engine.from_checkpoint(tiny_model, replace(SMALL, **{**native, **more})).describe()
        for more in ({}, pair.setting)
    )
    assert one.arithmetic != other.arithmetic


@needs_compiler
@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize("kernels", ["native", slow("xla")])
def test_two_starts_of_a_busy_machine_have_one_arithmetic(
    tiny_model: Path, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The times that warm-up measures are random. Where that may change bits, they choose nothing."""
    config = replace(SMALL, decode_steps=None, attention=kernels, matmul=kernels)
    engines = []
    for seed in (1, 2):
        monkeypatch.setattr("time.perf_counter", partial(next, _random_times(seed)))
        engines.append(Engine.from_checkpoint(tiny_model, config))
        engines[-1].warm_up()
    monkeypatch.undo()
    one, other = engines
    assert one.describe().arithmetic == other.describe().arithmetic
    if kernels == "native":
        assert bits(one) == bits(other)
    else:
        assert one._pace.decode_steps == other._pace.decode_steps == {}


def _random_times(seed: int) -> Iterator[float]:
    rng = random.Random(seed)
    return itertools.accumulate(rng.random() * 1e-3 for _ in itertools.count())


@needs_compiler
@pytest.mark.usefixtures("as_shipped")
@pytest.mark.slow
def test_the_number_of_threads_changes_no_bit(tiny_model: Path) -> None:
    """XLA reads the number once, at the start of a process."""
    env = {**os.environ, "PYTHONPATH": ""}
    found = {
        subprocess.run(
            [sys.executable, "-m", __name__, str(tiny_model)],
            cwd=ROOT, check=True, stdout=subprocess.PIPE, env={**env, "PJRT_NPROC": str(count)},
        ).stdout
        for count in (1, 2, 3)
    }  # fmt: skip
    assert len(found) == 1
    assert b"r0" in found.pop()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        sys.stdout.write(repr(bits(loaded(Path(sys.argv[1]), SMALL))))
    else:
        sys.stdout.write(table())
