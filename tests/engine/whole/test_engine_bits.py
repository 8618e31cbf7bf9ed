"""Log-probabilities are the same to the bit, whatever else a step has and however the prompt was cut.

Each type that the C++ kernels have and each kind of model is tested; `test_engine_states.py` has more about models with
recurrent states.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.engine import Engine, Request, SamplingParams
from penstock.engine.scheduling import scheduler
from tests.engine.engines import SMALL, VOCAB_SIZE, Result, drive, forget_prefixes, write_model
from tests.engine.whole.test_engine_states import CONVOLUTIONS, DELTA_NETS
from tests.support.needs import needs_compiler
from tests.support.patience import slow

pytestmark = [
    pytest.mark.versions,
    pytest.mark.usefixtures("as_shipped"),
    needs_compiler,
]

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("qwen3", {}),
    "windows and caps": ("gemma2", {"sliding_window": 12, "head_dim": 16}),
    "experts": ("qwen3_moe", {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20}),
    "experts behind a clamp, sinks": ("gpt_oss", {"sliding_window": 12, "num_local_experts": 5}),
    "convolutions": ("lfm2", CONVOLUTIONS),
    "delta nets and a shared expert": ("qwen3_next", DELTA_NETS),
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=9, logprobs=1, ignore_eos=True)


def bits(result: Result) -> list[tuple[int, float]]:
    logprobs = [entry.logprob for entry in result.logprobs]
    assert len(logprobs) == len(result.token_ids)
    return list(zip(result.token_ids, logprobs, strict=True))


def in_pieces(engine: Engine, request: Request, monkeypatch: pytest.MonkeyPatch) -> Result:
    chunk, rng = scheduler._chunk, random.Random(3)

    def small(*arguments: Any) -> int:
        return min(chunk(*arguments), rng.randint(1, 9))

    with monkeypatch.context() as patched:
        patched.setattr(scheduler, "_chunk", small)
        return drive(engine, [request])[request.id, 0]


QUICK = {("dense", "float16"), ("experts behind a clamp, sinks", "bfloat16")}


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        (kind, dtype) if (kind, dtype) in QUICK else slow(kind, dtype)
        for kind in MODELS
        for dtype in ("float32", "bfloat16", "float16")
    ],
)
def test_a_request_has_the_same_bits_however_it_is_computed(
    kind: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, fields = MODELS[kind]
    config = replace(SMALL, dtype=dtype, attention="native", matmul="native")
    engine = Engine.from_checkpoint(write_model(tmp_path, family, **fields), config)
    assert engine.describe().batch_invariant
    rng = np.random.default_rng(4)
    requests = [
        Request(f"r{i}", tuple(map(int, rng.integers(0, VOCAB_SIZE, length))), GREEDY)
        for i, length in enumerate((1, 7, 33, 50, 61))
    ]

    def afresh(run: Callable[[Request], Result], request: Request) -> list[tuple[int, float]]:
        forget_prefixes(engine)
        return bits(run(request))

    alone = {r.id: afresh(lambda r: drive(engine, [r])[r.id, 0], r) for r in requests}
    forget_prefixes(engine)
    together = drive(engine, requests)
    again = drive(engine, requests[::-1])  # with what the pages of the last run hold
    for request in requests:
        expected = alone[request.id]
        assert bits(together[request.id, 0]) == expected
        assert bits(again[request.id, 0]) == expected
        assert afresh(lambda r: in_pieces(engine, r, monkeypatch), request) == expected
    assert sum(result.num_cached for result in again.values()) > 0
    for request in requests[1::2]:
        tokens = tuple(token for token, _ in alone[request.id])
        for done in (1, 4, 8):
            resumed = replace(request, generated=(tokens[:done],))
            rest = afresh(lambda r: drive(engine, [r, requests[0]])[r.id, 0], resumed)
            assert rest == alone[request.id][done:]
