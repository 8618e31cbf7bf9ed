"""What is answered to a call: of a request that is prepared like any other, and never generated for."""

from __future__ import annotations

from collections.abc import Callable

import structlog

from penstock.engine.errors import InvalidRequest, RequestError
from penstock.engine.generation_defaults import GenerationDefaults
from penstock.engine.request import Request
from penstock.producer.wire import Call, GenerateRequest, WireError, parse_call
from penstock.worker.config import WorkerConfig
from penstock.worker.delivery.admission import (
    TextEncoder,
    check_limits,
    check_prompt,
    encode_prompt,
    to_engine_request,
)
from penstock.worker.delivery.entries import QueueEntry
from penstock.worker.delivery.threads import Threads

_log = structlog.get_logger(__name__)

Answer = dict[str, str]
"""The fields of an answer, but for whose it is."""


class Answerer:
    """Answers calls by the model's tokenizer and the engine's limits, in threads of its own."""

    def __init__(
        self,
        config: WorkerConfig,
        text: TextEncoder,
        defaults: GenerationDefaults,
        check: Callable[[Request], None],
    ) -> None:
        self._config = config
        self._text = text
        self._defaults = defaults
        self._check = check
        self._threads = Threads()

    def close(self) -> None:
        self._threads.close()

    async def answer(self, entry: QueueEntry) -> Answer:
        """What a call's entry asks for, or why it can't be had. Raises nothing: a call harms nobody but itself."""
        try:
            return await self._answer(entry)
        except (RequestError, WireError) as error:
            return refusal(error.code, str(error))
        except Exception:
            _log.exception("call_failed", entry=entry.id)
            return refusal("internal_error", "the worker failed to answer; its log says why")

    async def _answer(self, entry: QueueEntry) -> Answer:
        call = await self._threads.run(lambda: self._parse(entry), entry.fields)

        def work() -> Answer:
            return self.answer_now(call)

        if call.request.messages is not None:
            return await self._threads.run_chat(work)
        return await self._threads.run(work, entry.fields)

    def _parse(self, entry: QueueEntry) -> Call:
        return parse_call(entry.id, entry.fields, max_body_bytes=self._config.max_body_bytes, size=entry.size)

    def answer_now(self, call: Call) -> Answer:
        """As `answer`, of a call that was read. Blocks.

        Raises:
            RequestError: it can't be answered.
        """
        if call.name == "detokenize":
            return {"text": self._decode(call.request.prompt_token_ids or ())}
        tokens = encode_prompt(call.request, self._text)
        if call.name == "validate":
            self._validate(call.request, tokens)
        answer = {"prompt_tokens": str(len(tokens))}
        if call.name == "tokenize":
            answer["tokens"] = ",".join(map(str, tokens))
        return answer

    def _decode(self, token_ids: tuple[int, ...]) -> str:
        for token_id in token_ids:
            if token_id >= self._text.vocab_size:
                last = self._text.vocab_size - 1
                raise InvalidRequest(f"prompt_token_ids holds {token_id}, the vocabulary ends at {last}")
        return self._text.decode(token_ids)

    def _validate(self, request: GenerateRequest, tokens: tuple[int, ...]) -> None:
        check_limits(request, self._config)
        check_prompt(tokens, self._config)
        self._check(to_engine_request(request, tokens, self._defaults))


def refusal(code: str, message: str) -> Answer:
    """An answer that says why there is none."""
    return {"code": code, "message": message}
