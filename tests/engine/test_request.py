"""Sampling parameters: what is refused, and what is derived from them."""

from __future__ import annotations

import re
from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from penstock.engine import InvalidRequest, Request, SamplingParams
from penstock.engine.request import MAX_STOP_TOKENS


@pytest.mark.parametrize(
    ("value", "names"),
    [
        ({"temperature": float("nan")}, "temperature must be 0 to 100, not nan"),
        ({"top_k": -1}, "top_k must be 0 or more, not -1"),
        ({"top_p": 0.0}, "top_p must be above 0, up to 1, not 0.0"),
        ({"seed": 2**63}, f"seed must be 0 to 2**63 - 1, not {2**63}"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens must be 0 to 4, not 5"),
        ({"frequency_penalty": -2.1}, "frequency_penalty must be -2 to 2, not -2.1"),
        ({"stop": ("a", "")}, "stop must be strings that are not empty, not ('a', '')"),
        ({"stop_token_ids": (1,) * (MAX_STOP_TOKENS + 1)}, "stop_token_ids must be at most 32 ids, not 33"),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(value: dict[str, Any], names: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(names)):
        SamplingParams(**value)


@pytest.mark.parametrize("bias", [1e39, -1e39, 100.1, -101.0, float("inf"), float("-inf"), float("nan")])
def test_a_bias_out_of_range_is_refused_by_name(bias: float) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(f"logit_bias of token 7 must be -100 to 100, not {bias}")):
        SamplingParams(logit_bias={3: 100.0, 7: bias})


@pytest.mark.parametrize(
    "value",
    [
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.1},
        {"frequency_penalty": -0.1},
        {"logit_bias": {3: 0.0}},
        {"allowed_token_ids": (1,)},
        {"bad_token_ids": (1,)},
    ],
    ids=str,
)
def test_penalties_biases_and_restrictions_adjust_the_logits(value: dict[str, Any]) -> None:
    assert SamplingParams(**value).adjusts_logits


def test_filters_stops_and_log_probabilities_leave_the_logits_alone() -> None:
    plain = SamplingParams(temperature=0.3, top_k=5, top_p=0.5, min_p=0.1, seed=3, stop=("a",), stop_token_ids=(3,))
    assert not plain.adjusts_logits
    assert not SamplingParams(logprobs=3, min_tokens=2).adjusts_logits


def test_a_sequence_is_ended_by_the_models_tokens_and_its_own_unless_it_ignores_the_models() -> None:
    assert SamplingParams(stop_token_ids=(7, 8)).stop_ids((1, 2)) == (1, 2, 7, 8)
    assert SamplingParams(stop_token_ids=(7,), ignore_eos=True).stop_ids((1, 2)) == (7,)
    assert SamplingParams().stop_ids(()) == ()


def test_a_request_is_a_value() -> None:
    request = Request("r", (1, 2))
    assert request == Request("r", (1, 2), SamplingParams())
    with pytest.raises(FrozenInstanceError):
        request.priority = 1  # type: ignore[misc]
