"""Answers questions about prompts for an `LLM`, as a worker does for a client."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Unpack

from penstock.producer.request import Prompt, build_request, request_of_tokens
from penstock.protocol.ids import new_id
from penstock.protocol.wire import AnswerEntry, Call, CallName, Sampling


class Asking(ABC):
    """The calls of `Client`, without their time-outs: nothing here waits for others."""

    def count_tokens(self, prompt: Prompt, **sampling: Unpack[Sampling]) -> int:
        """Counts the tokens of a prompt, or of a chat in the model's template; it may be too long to run.

        Raises:
            RequestRefused: an option is unknown or out of range, or the chat template refuses the messages.
            EngineFailed: the engine has ended, or the LLM is closed.
        """
        return self._call("count_tokens", prompt, sampling).prompt_tokens or 0

    def tokenize(self, prompt: Prompt, **sampling: Unpack[Sampling]) -> tuple[int, ...]:
        """Returns the tokens of a prompt, including those that the tokenizer or template adds. Raises like
        `count_tokens`.
        """
        return self._call("tokenize", prompt, sampling).tokens or ()

    def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Returns the text of tokens, special ones left out or spelled. Raises like `count_tokens`."""
        request = request_of_tokens(token_ids, fresh_id=new_id(), skip_special_tokens=skip_special_tokens)
        return (self._ask(Call("detokenize", request)).text or "") if request.prompt_token_ids else ""

    def validate(self, prompt: Prompt, **sampling: Unpack[Sampling]) -> int:
        """Checks that `generate` would take this request; returns its number of prompt tokens.

        Raises:
            RequestRefused: it would not; the message says why.
            EngineFailed: as for `count_tokens`.
        """
        return self._call("validate", prompt, sampling).prompt_tokens or 0

    def _call(self, name: CallName, prompt: Prompt, sampling: Sampling) -> AnswerEntry:
        return self._ask(Call(name, build_request(prompt, sampling, fresh_id=new_id())))

    @abstractmethod
    def _ask(self, call: Call) -> AnswerEntry: ...
