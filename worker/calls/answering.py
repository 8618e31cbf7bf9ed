"""Answers calls: requests that are prepared like any other but never generated for."""

from __future__ import annotations

from collections.abc import Callable

import structlog

from penstock.engine.errors import InvalidRequest, RequestError
from penstock.engine.generation_defaults import GenerationDefaults
from penstock.engine.request import Request
from penstock.protocol.wire import Call, Envelope, GenerateRequest, WireError, parse_call, spell_tokens
from penstock.worker.config import WorkerConfig
from penstock.worker.intake.admission import check_limits, to_engine_request
from penstock.worker.intake.preparation import Preparer
from penstock.worker.run.entries import QueueEntry
from penstock.worker.threads import Threads

_log = structlog.get_logger(__name__)

Answer = dict[str, str]
"""Fields of an answer, without its addressee."""

MAX_GROWTH = 4  # times `max_body_bytes` is the limit of an answer: a token's text may be much longer than its id


class Answerer:
    """Answers the entries of the stream of calls, in threads of its own."""

    def __init__(self, max_body_bytes: int, answers: Answers) -> None:
        self._max_body_bytes = max_body_bytes
        self._answers = answers
        self._threads = Threads()

    def close(self) -> None:
        self._threads.close()

    async def answer(self, entry: QueueEntry) -> Answer:
        """Returns what a call's entry asks for, or why there is no answer. Raises nothing: a call harms only itself."""
        try:
            return self._bounded(await self._answer(entry))
        except (RequestError, WireError) as error:
            return refusal(error.code, str(error))
        except Exception:
            _log.exception("call_failed", entry=entry.id)
            return refusal("internal_error", "the worker failed to answer; its log says why")

    async def envelope(self, entry: QueueEntry) -> Envelope:
        """Returns who sent the call, and where its answer goes."""
        return await self._threads.read(lambda: Envelope.of(entry.id, entry.fields), entry.fields)

    async def _answer(self, entry: QueueEntry) -> Answer:
        call = await self._threads.read(lambda: self._parse(entry), entry.fields)

        def work() -> Answer:
            return self._answers.to(call, _sent_s(entry.id))

        if call.request.messages is not None:
            return await self._threads.run_chat(work)
        if call.name == "validate":  # validation may compile a grammar
            return await self._threads.run_grammar(work)
        return await self._threads.run(work, entry.fields)

    def _bounded(self, answer: Answer) -> Answer:
        """Replaces an answer that is too large: Redis keeps answers until they are read."""
        num_bytes, limit = sum(len(value.encode()) for value in answer.values()), MAX_GROWTH * self._max_body_bytes
        if num_bytes <= limit:
            return answer
        message = f"the answer has {num_bytes} bytes, the limit is {limit}, {MAX_GROWTH} times max_body_bytes"
        return refusal("too_large", message)

    def _parse(self, entry: QueueEntry) -> Call:
        return parse_call(entry.id, entry.fields, max_body_bytes=self._max_body_bytes, size=entry.size)


class Answers:
    """Answers from the model's tokenizer, its template and the engine's limits. Any thread may call it.

    Args:
        config: the worker's limits.
        preparer: prepares requests.
        vocab_size: token ids are below it.
        defaults: the model's.
        check: raises RequestError for what the engine can never serve.
    """

    def __init__(
        self,
        config: WorkerConfig,
        preparer: Preparer,
        vocab_size: int,
        defaults: GenerationDefaults,
        check: Callable[[Request], None],
    ) -> None:
        self._config = config
        self._preparer = preparer
        self._vocab_size = vocab_size
        self._defaults = defaults
        self._check = check

    def to(self, call: Call, now_s: float | None = None) -> Answer:
        """Answers a call; may block for a chat template.

        Args:
            call: the question.
            now_s: when the call was sent, in Unix time; chat templates take it for the present.

        Raises:
            RequestError: the call can't be answered.
        """
        if call.name == "detokenize":
            return {"text": self._decode(call.request)}
        if call.name == "validate":
            return _counted(self._validate(call.request, now_s))
        tokens = self._preparer.encode(call.request, now_s).prompt_token_ids
        listed = {"tokens": spell_tokens(tokens)} if call.name == "tokenize" else {}
        return _counted(tokens) | listed

    def _decode(self, asked: GenerateRequest) -> str:
        token_ids = asked.prompt_token_ids or ()
        for token_id in token_ids:
            if token_id >= self._vocab_size:
                last = self._vocab_size - 1
                raise InvalidRequest(f"prompt_token_ids holds {token_id}, the vocabulary ends at {last}")
        text = self._preparer.text
        return text.decode(token_ids) if asked.skip_special_tokens else text.spell_all(token_ids)

    def _validate(self, asked: GenerateRequest, now_s: float | None) -> tuple[int, ...]:
        check_limits(asked, self._config)
        preparation = self._preparer.prepare(asked, now_s)
        self._check(to_engine_request(asked, preparation, self._defaults))
        return preparation.prompt_token_ids


def _counted(tokens: tuple[int, ...]) -> Answer:
    return {"prompt_tokens": str(len(tokens))}


def refusal(code: str, message: str) -> Answer:
    """Makes an answer that says why the call failed."""
    return {"code": code, "message": message}


def _sent_s(entry_id: str) -> float:
    """Returns when Redis accepted the call; chat templates take it for the present."""
    return int(entry_id.partition("-")[0]) / 1000
