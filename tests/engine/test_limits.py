"""An engine refuses bad requests before it computes anything, by name and with the offending value."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from penstock.engine import InvalidRequest, PromptTooLong, Request, SamplingParams
from penstock.engine.limits import EngineLimits
from penstock.engine.request import MAX_PROMPT_LOGPROBS

VOCAB, EOS = 272, 264
LIMITS = EngineLimits(vocab_size=VOCAB, max_model_len=96, max_num_seqs=4, eos_token_ids=(EOS,))
STOPPING: dict[str, Any] = {"stop_token_ids": (4, 5), "ignore_eos": True, "min_tokens": 2}


@pytest.mark.parametrize(
    ("request_", "names"),
    [
        (Request("r", ()), "no tokens"),
        (Request("r", (VOCAB,)), f"prompt_token_ids holds {VOCAB}"),
        (Request("r", (-1,)), "prompt_token_ids holds -1"),
        (Request("r", (1,), SamplingParams(stop_token_ids=(999,))), "stop_token_ids holds 999"),
        (Request("r", (1,), SamplingParams(logit_bias={999: 1.0})), "logit_bias holds 999"),
        (Request("r", (1,), SamplingParams(allowed_token_ids=(4,), bad_token_ids=(4, 5))), "none of allowed_token_ids"),
        (
            Request("r", (1,), SamplingParams(bad_token_ids=tuple(range(VOCAB)))),
            f"none of the {VOCAB} tokens",
        ),
        (
            Request("r", (1,), SamplingParams(allowed_token_ids=(EOS,), min_tokens=1)),
            "min_tokens is 1.* but those that",
        ),
        (
            Request("r", (1,), SamplingParams(allowed_token_ids=(4, 5, 6), bad_token_ids=(6,), **STOPPING)),
            "min_tokens is 2, and bad_token_ids leaves none of allowed_token_ids but those that stop",
        ),
        (Request("r", (1,), SamplingParams(stop_token_ids=tuple(range(32)))), "33 stop tokens"),
        (Request("r", (1,), n=5), "n must be 1 to 4, not 5"),
        (Request("r", (1,), n=2, generated=((1,),)), "generated has 1 entries for 2 choices"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(request_: Request, names: str) -> None:
    with pytest.raises(InvalidRequest, match=names):
        LIMITS.check(request_)


def test_log_probabilities_of_a_prompt_are_limited_in_all() -> None:
    limits = replace(LIMITS, max_model_len=MAX_PROMPT_LOGPROBS)
    longest = MAX_PROMPT_LOGPROBS // 6
    limits.check(Request("r", (1,) * longest, SamplingParams(prompt_logprobs=5)))
    too_many = f"prompt_logprobs 5 of a prompt of {longest + 1} tokens is {6 * longest + 6} .* the limit is 8192"
    with pytest.raises(InvalidRequest, match=too_many):
        limits.check(Request("r", (1,) * (longest + 1), SamplingParams(prompt_logprobs=5)))
    limits.check(Request("r", (1,) * (longest + 1), SamplingParams(logprobs=5)))


def test_a_prompt_leaves_one_token_for_an_answer_and_a_resumed_request_may_be_full() -> None:
    LIMITS.check(Request("r", (1,) * 95))
    with pytest.raises(PromptTooLong, match="the prompt has 96 tokens; with max_model_len 96 it can have 95"):
        LIMITS.check(Request("r", (1,) * 96))
    LIMITS.check(Request("r", (1,) * 90, generated=((2,) * 6,)))
    with pytest.raises(PromptTooLong, match="prompt and generated tokens are 97, max_model_len is 96"):
        LIMITS.check(Request("r", (1,) * 90, n=2, generated=((), (2,) * 7)))


def test_what_stops_may_be_all_that_is_allowed_unless_a_minimum_suppresses_it() -> None:
    LIMITS.check(Request("r", (1,), SamplingParams(allowed_token_ids=(EOS,))))
    LIMITS.check(Request("r", (1,), SamplingParams(allowed_token_ids=(EOS,), min_tokens=1, ignore_eos=True)))
    with pytest.raises(InvalidRequest, match="min_tokens is 1"):
        LIMITS.check(Request("r", (1,), SamplingParams(allowed_token_ids=(EOS,), min_tokens=1)))


def test_every_token_of_the_vocabulary_may_be_named() -> None:
    every = tuple(range(VOCAB))
    LIMITS.check(Request("r", every[:95], SamplingParams(bad_token_ids=every[1:], logit_bias={VOCAB - 1: 1.0})))
