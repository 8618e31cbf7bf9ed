"""A request on the wire becomes a request of the engine."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.engine.errors import InvalidRequest
from penstock.engine.generation_defaults import GenerationDefaults
from penstock.engine.request import ResponseSpec, SamplingParams
from penstock.protocol.wire import GenerateRequest
from penstock.worker.config import WorkerConfig
from penstock.worker.intake.admission import check_limits, to_engine_request
from penstock.worker.intake.preparation import Preparation

DEFAULTS = GenerationDefaults(
    (2,), SamplingParams(temperature=0.6, top_k=20, top_p=0.9, min_p=0.1, repetition_penalty=1.1)
)


def test_open_fields_take_the_model_s_defaults() -> None:
    request = GenerateRequest(id="r", prompt="x")
    sampling = to_engine_request(request, Preparation((1,)), DEFAULTS).sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.6, 20, 0.9)
    assert (sampling.min_p, sampling.repetition_penalty, sampling.seed) == (0.1, 1.1, None)


def test_what_the_request_says_wins_over_the_defaults_even_at_zero() -> None:
    request = GenerateRequest(
        id="r", prompt="x", temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0, seed=0
    )
    sampling = to_engine_request(request, Preparation((1,)), DEFAULTS).sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.0, 0, 1.0)
    assert (sampling.min_p, sampling.repetition_penalty, sampling.seed) == (0.0, 1.0, 0)


def test_what_is_no_sampling_reaches_the_engine() -> None:
    request = GenerateRequest(id="r", prompt="x", n=2, priority=5, cache_salt="s")
    preparation = Preparation((8, 9), ResponseSpec("hermes"), "said")
    result = to_engine_request(request, preparation, GenerationDefaults(()), ((1,), (2, 3)))
    assert (result.id, result.n, result.priority, result.prompt_token_ids) == ("r", 2, 5, (8, 9))
    assert (result.generated, result.response, result.echo) == (((1,), (2, 3)), ResponseSpec("hermes"), "said")
    assert (result.cache_salt, result.sampling) == ("s", SamplingParams())


@pytest.mark.parametrize(
    ("config", "fields", "message"),
    [
        ({"max_n": 2}, {"n": 3}, "n is 3, the limit max_n is 2"),
        (
            {"max_stop_strings": 1},
            {"stop": ("a", "b")},
            "the number of stop strings is 2, the limit max_stop_strings is 1",
        ),
        (
            {"max_stop_chars": 2},
            {"stop": ("ab", "abc")},
            "the length of a stop string is 3, the limit max_stop_chars is 2",
        ),
        ({}, {"keep_s": 604_800.5}, "keep_s is 604800.5, the limit max_keep_s is 604800"),
    ],
)
def test_limits_are_named(config: dict[str, Any], fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        check_limits(GenerateRequest(prompt="x", **fields), WorkerConfig(**config))


def test_what_is_at_its_limit_is_taken() -> None:
    check_limits(
        GenerateRequest(prompt="ab", n=2, stop=("ab",), keep_s=60),
        WorkerConfig(max_n=2, max_stop_strings=1, max_stop_chars=2, max_keep_s=60),
    )


def test_a_request_needs_an_id() -> None:
    with pytest.raises(InvalidRequest, match="no id"):
        to_engine_request(GenerateRequest(prompt="x"), Preparation((1,)), GenerationDefaults(()))
