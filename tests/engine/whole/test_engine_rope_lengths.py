"""Rotary frequencies may follow from a sequence's length: tokens are those of generate, whatever the engine does."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.engine import Engine, Request, SamplingParams
from tests.engine.checkpoints import reference_greedy
from tests.engine.engines import SMALL, VOCAB_SIZE, drive, write_model

ORIGINAL = 32
NUM_TOKENS = 30
PARAMS = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
TOKENS = tuple(map(int, np.random.default_rng(3).integers(0, VOCAB_SIZE, 60)))
PROMPTS = [TOKENS[:length] for length in (3, 18, 24, 31, 32, 33, 40)]  # they share whole pages
NUM_CROSSING = 4  # of the prompts: the first one's last token is sampled from as many as the original length

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "longrope": (
        "phi3",
        {
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1000.0,
                "short_factor": [1.0, 1.1, 1.3, 1.4, 1.6, 1.8],
                "long_factor": [1.0, 2.0, 2.5, 3.0, 5.0, 9.0],
            },
            "original_max_position_embeddings": ORIGINAL,
        },
    ),
    "dynamic": (
        "llama",
        {
            "max_position_embeddings": ORIGINAL,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1000.0, "factor": 3.0},
        },
    ),
}


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, config = MODELS[request.param]
    return write_model(tmp_path_factory.mktemp(request.param), family, num_hidden_layers=3, **config)


@cache
def expected(model: Path) -> list[list[int]]:
    return [reference_greedy(model, list(prompt), NUM_TOKENS) for prompt in PROMPTS]


def tokens_of(engine: Engine, requests: list[Request]) -> list[list[int]]:
    results = drive(engine, requests)
    return [results[request.id, 0].token_ids for request in requests]


@pytest.mark.parametrize("changes", [{}, {"num_pages": 20}, {"decode_steps": 4}], ids=str)
def test_both_sides_of_the_crossing_equal_generate(model: Path, changes: dict[str, Any]) -> None:
    engine = Engine.from_checkpoint(model, replace(SMALL, **changes))
    for name in "ab":  # the second time, prompts are found in the prefix cache
        assert tokens_of(engine, [Request(f"{name}{i}", p, PARAMS) for i, p in enumerate(PROMPTS)]) == expected(model)
    rule = engine._scheduler._length_rule
    num_restarts = 2 * NUM_CROSSING if rule is not None and rule.switches else 0
    has_room = "num_pages" not in changes
    assert (engine.stats().preemptions_total == num_restarts) == has_room
    assert engine.stats().preemptions_total >= num_restarts


def test_a_request_alone_and_resumed_at_any_token_gives_the_same(model: Path) -> None:
    engine = Engine.from_checkpoint(model, SMALL)
    for prompt, whole in zip(PROMPTS, expected(model), strict=True):
        for done in range(0, NUM_TOKENS, 7):
            resumed = Request(f"{len(prompt)}-{done}", prompt, PARAMS, generated=(tuple(whole[:done]),))
            assert tokens_of(engine, [resumed]) == [whole[done:]], (len(prompt), done)


def test_a_request_alone_crosses_in_the_middle_of_a_dispatch(model: Path) -> None:
    """Tokens sampled in the steps behind the crossing are not committed: a request that got them never ended."""
    engine = Engine.from_checkpoint(model, replace(SMALL, decode_steps=4))
    for prompt, whole in zip(PROMPTS, expected(model), strict=True):
        assert tokens_of(engine, [Request(str(len(prompt)), prompt, PARAMS)]) == [whole], len(prompt)


def test_a_model_whose_sequences_never_are_so_long_uploads_no_lengths(model: Path) -> None:
    engine = Engine.from_checkpoint(model, replace(SMALL, max_model_len=ORIGINAL))
    assert not engine._builder._geometry.has_lengths
    assert tokens_of(engine, [Request("a", PROMPTS[1], PARAMS)]) == [expected(model)[1][: ORIGINAL - len(PROMPTS[1])]]
