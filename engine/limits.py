"""What one engine can serve: a request that can never succeed is refused before anything is computed."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

from penstock.engine.errors import InvalidRequest, PromptTooLong
from penstock.engine.request import MAX_PROMPT_LOGPROBS, MAX_STOP_TOKENS, Request, SamplingParams


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Limits that never change while an engine lives, so that any thread may check against them."""

    vocab_size: int
    max_model_len: int  # prompt and generated tokens of one sequence
    max_num_seqs: int
    eos_token_ids: tuple[int, ...]

    def check(self, request: Request) -> None:
        """Raises RequestError if `request` can never be served."""
        self._check_lengths(request)
        self._check_token_ids(request)
        self._check_choices(request)
        self._check_stops(request.sampling)
        self._check_candidates(request.sampling)
        if request.grammar is not None:
            _check_grammar(request.sampling)
        if request.sampling.prompt_logprobs is not None:
            _check_prompt_logprobs(len(request.prompt_token_ids), request.sampling.prompt_logprobs)

    def _check_lengths(self, request: Request) -> None:
        num_prompt = len(request.prompt_token_ids)
        if not num_prompt:
            raise InvalidRequest("the prompt has no tokens")
        if num_prompt >= self.max_model_len:
            raise PromptTooLong(
                f"the prompt has {num_prompt} tokens; with max_model_len {self.max_model_len} "
                f"it can have {self.max_model_len - 1}, as an answer takes at least one"
            )
        for generated in request.generated:
            if num_prompt + len(generated) > self.max_model_len:
                raise PromptTooLong(
                    f"prompt and generated tokens are {num_prompt + len(generated)}, "
                    f"max_model_len is {self.max_model_len}"
                )

    def _check_token_ids(self, request: Request) -> None:
        params = request.sampling
        named: tuple[tuple[str, Iterable[int]], ...] = (
            ("prompt_token_ids", request.prompt_token_ids),
            ("generated", itertools.chain(*request.generated)),
            ("logit_bias", params.logit_bias),
            ("allowed_token_ids", params.allowed_token_ids),
            ("bad_token_ids", params.bad_token_ids),
            ("stop_token_ids", params.stop_token_ids),
        )
        for name, ids in named:
            for token_id in ids:
                if not 0 <= token_id < self.vocab_size:
                    raise InvalidRequest(f"{name} holds {token_id}, the vocabulary ends at {self.vocab_size - 1}")

    def _check_choices(self, request: Request) -> None:
        if not 1 <= request.n <= self.max_num_seqs:
            raise InvalidRequest(f"n must be 1 to {self.max_num_seqs}, not {request.n}")
        if request.generated and len(request.generated) != request.n:
            raise InvalidRequest(f"generated has {len(request.generated)} entries for {request.n} choices")

    def _check_stops(self, params: SamplingParams) -> None:
        num_stops = len(params.stop_ids(self.eos_token_ids))
        if num_stops > MAX_STOP_TOKENS:
            raise InvalidRequest(f"{num_stops} stop tokens, the model's own included; the limit is {MAX_STOP_TOKENS}")

    def _check_candidates(self, params: SamplingParams) -> None:
        """Checks that some token is left to sample, even while `min_tokens` suppresses the stop tokens."""
        candidates = params.allowed_token_ids or range(self.vocab_size)
        of = "allowed_token_ids" if params.allowed_token_ids else f"the {self.vocab_size} tokens there are"
        forbidden = set(params.bad_token_ids)
        if all(token_id in forbidden for token_id in candidates):
            raise InvalidRequest(f"bad_token_ids leaves none of {of}")
        forbidden.update(params.stop_ids(self.eos_token_ids))
        if params.min_tokens and all(token_id in forbidden for token_id in candidates):
            raise InvalidRequest(
                f"min_tokens is {params.min_tokens}, and bad_token_ids leaves none of {of} but those that stop"
            )


def _check_grammar(params: SamplingParams) -> None:
    """Refuses parameters that could leave a reply, somewhere in its grammar, with no token to continue or to end."""
    num_allowed = len(params.allowed_token_ids)
    refused = {
        "min_tokens": params.min_tokens,
        "ignore_eos": params.ignore_eos,
        "allowed_token_ids": num_allowed and f"{num_allowed} ids",
    }
    for name, value in refused.items():
        if value:
            raise InvalidRequest(
                f"{name} ({value}) contradicts the grammar, which says what may come and where the reply ends"
            )


def _check_prompt_logprobs(num_prompt: int, num_top: int) -> None:
    count = num_prompt * (num_top + 1)
    if count > MAX_PROMPT_LOGPROBS:
        raise InvalidRequest(
            f"prompt_logprobs {num_top} of a prompt of {num_prompt} tokens is {count} log-probabilities; "
            f"the limit is {MAX_PROMPT_LOGPROBS}"
        )
