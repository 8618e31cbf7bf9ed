"""A deterministic engine without a model: any reader can tell whether a reply is right, whole and in order.

Token i of a choice is a hash of (prompt, seed or request id, choice, i), and its text is a short word. So what a
request must give is known from the request alone, whichever workers it ran on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from types import MappingProxyType

from penstock.engine.errors import InvalidRequest, PromptTooLong
from penstock.engine.generation_defaults import GenerationDefaults
from penstock.engine.request import FinishReason, Output, Prefill, Request, TokenLogprob, TopLogprob
from penstock.engine.stats import EngineStats
from penstock.engine.text.conversation import Conversation, EncodedChat
from penstock.engine.text.fewest_tokens import Check, let_pass
from penstock.tools.chaos.fake_words import Said, Speech, everything_said, speech_of, word
from penstock.worker.service import Model

VOCAB_SIZE = 4096
POISON = 0  # a prompt with this token (a NUL in its text) ends the engine with an error


def expected_tokens(prompt: Sequence[int], source: str | int, index: int, count: int, start: int = 0) -> list[int]:
    """Returns tokens [start, count) of choice `index`; `source` is the request's seed, else its id."""
    key = blake2b(repr((tuple(prompt), str(source), index)).encode(), digest_size=16).digest()
    return [
        int.from_bytes(blake2b(key + str(at).encode(), digest_size=4).digest(), "big") % VOCAB_SIZE
        for at in range(start, count)
    ]


def expected_text(prompt: str, source: str | int, count: int, index: int = 0) -> str:
    """Returns the whole text of a choice of `count` tokens, for a prompt as `FakeText` encodes it."""
    return "".join(word(token) for token in expected_tokens(prompt.encode(), source, index, count))


def expected_speech(prompt: str, request_id: str, tokens: Sequence[int], index: int) -> Said:
    """Returns what these tokens say as a whole reply to such a prompt."""
    return everything_said(speech_of(prompt.encode(), request_id, index, holds_back=False), tokens)


class FakeText:
    """A byte tokenizer."""

    vocab_size = 256
    special_token_ids: Mapping[str, int] = MappingProxyType({})

    def encode(self, text: str, check: Check = let_pass) -> Sequence[int]:
        return tuple(text.encode())

    def encode_chat(self, chat: Conversation, check: Check = let_pass) -> EncodedChat:
        if chat.messages[-1]["role"] != "user":
            raise InvalidRequest(f"the last message must be the user's, not the {chat.messages[-1]['role']}'s")
        text = "|".join(f"{message['role']}:{message['content']}" for message in chat.messages)
        return EncodedChat(tuple(text.encode()), text)

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(token_ids).decode(errors="replace")

    decode_prompt = spell_all = decode


@dataclass(slots=True)
class _Row:
    request: Request
    index: int
    prefill_left: int
    tokens: list[int]
    speech: Speech  # has read the tokens
    ended: FinishReason | None = None


class FakeEngine:
    """A `StepEngine`. Each step gives every running sequence one token.

    Args:
        max_num_seqs: sequences that run at once; the others wait.
        max_model_len: longest prompt in tokens; longer ones are refused.
        prefill_steps: steps that a new sequence takes before its first token.
        step_s: how long a step takes.
        holds_back: delays text by one token, as if each token could begin a stop string.

    A prompt that begins with `CALL` gets a reply with reasoning and tool calls.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int = 8,
        max_model_len: int = 100_000,
        prefill_steps: int = 0,
        step_s: float = 0.0,
        holds_back: bool = False,
    ) -> None:
        self.max_num_seqs = max_num_seqs
        self.most_rows = 0  # most sequences that were ever here at once, running and waiting
        self.prefilled: list[str] = []  # ids of the requests that ran, in order
        self._max_model_len = max_model_len
        self._prefill_steps = prefill_steps
        self._step_s = step_s
        self._holds_back = holds_back
        self._rows: list[_Row] = []
        self._steps = 0
        self._generated = 0
        self._lock = threading.Lock()
        self._allowed: int | None = None  # steps; None: any number

    def hold(self) -> None:
        """Lets no step make progress until `allow`."""
        with self._lock:
            self._allowed = 0

    def allow(self, steps: int | None = None) -> None:
        """Lets `steps` more steps make progress; None: all further ones."""
        with self._lock:
            self._allowed = None if steps is None or self._allowed is None else self._allowed + steps

    def check(self, request: Request) -> None:
        if not request.prompt_token_ids:
            raise InvalidRequest("the prompt is empty")
        if len(request.prompt_token_ids) > self._max_model_len:
            raise PromptTooLong(f"the prompt has {len(request.prompt_token_ids)} tokens, at most {self._max_model_len}")

    def enqueue(self, request: Request) -> None:
        self.prefilled.append(request.id)
        for index in range(request.n):
            generated = list(request.generated[index]) if request.generated else []
            speech = speech_of(request.prompt_token_ids, request.id, index, holds_back=self._holds_back)
            for token in generated:
                speech.push(token)  # an earlier run has published what they released
            self._rows.append(_Row(request, index, self._prefill_steps, generated, speech))
        self.most_rows = max(self.most_rows, len(self._rows))

    def abort(self, request_id: str, reason: FinishReason) -> None:
        for row in self._rows:
            if row.request.id == request_id:
                row.ended = reason

    def slack_s(self) -> float:
        return 0.0

    def has_work(self) -> bool:
        return bool(self._rows)

    def step(self) -> list[Output]:
        if not self._may_go_on():
            time.sleep(0.001)  # a slow device, but aborts are still noticed
            return self._take_aborted()
        if self._step_s:
            time.sleep(self._step_s)
        self._steps += 1
        outputs = self._take_aborted()
        for row in self._rows[: self.max_num_seqs]:
            if POISON in row.request.prompt_token_ids:
                raise RuntimeError(f"request {row.request.id} is poison")
            if row.prefill_left:
                row.prefill_left -= 1
                outputs.append(self._prefilled(row))
                continue
            outputs.append(self._advance(row))
        self._rows = [row for row in self._rows if row.ended is None]
        return outputs

    def stats(self) -> EngineStats:
        return EngineStats(
            num_running=min(len(self._rows), self.max_num_seqs),
            num_waiting=max(0, len(self._rows) - self.max_num_seqs),
            num_pages=100,
            num_free_pages=100 - len(self._rows),
            steps_total=self._steps,
            generated_tokens_total=self._generated,
        )

    def _may_go_on(self) -> bool:
        with self._lock:
            if self._allowed is None:
                return True
            if not self._allowed:
                return False
            self._allowed -= 1
            return True

    def _take_aborted(self) -> list[Output]:
        aborted = [row for row in self._rows if row.ended is not None]
        self._rows = [row for row in self._rows if row.ended is None]
        return [_output(row, (), row.speech.finish()) for row in aborted]

    def _prefilled(self, row: _Row) -> Output:
        num_tokens = len(row.request.prompt_token_ids) + len(row.tokens)
        num_done = self._prefill_steps - row.prefill_left
        prefill = Prefill(num_tokens * num_done // (self._prefill_steps + 1), num_tokens)
        return replace(_output(row, (), Said()), prefill=prefill)

    def _advance(self, row: _Row) -> Output:
        row.ended = _reason(row)
        if row.ended is not None:  # an earlier run generated the rest, and published it
            return _output(row, (), Said())
        params, at = row.request.sampling, len(row.tokens)
        source = row.request.id if params.seed is None else params.seed
        [new] = expected_tokens(row.request.prompt_token_ids, source, row.index, at + 1, at)
        row.tokens.append(new)
        self._generated += 1
        said = row.speech.push(new)
        row.ended = _reason(row)
        return _output(row, (new,), said if row.ended is None else said.then(row.speech.finish()))


def fake_model(engine: FakeEngine | None = None) -> Model:
    """Makes the model of workers in tests."""
    return Model(engine or FakeEngine(), FakeText(), GenerationDefaults(eos_token_ids=()))


def _output(row: _Row, new: tuple[int, ...], said: Said) -> Output:
    wants = row.request.sampling.logprobs
    num_prompt = len(row.request.prompt_token_ids)
    return Output(
        row.request.id,
        row.index,
        offset=len(row.tokens) - len(new),
        token_ids=new,
        text=said.text,
        logprobs=None if wants is None else tuple(map(_logprob, new)),
        finish_reason=row.ended,
        num_prompt_tokens=num_prompt,
        num_cached_tokens=min(4, num_prompt),
        reasoning=said.reasoning,
        tool_calls=said.tool_calls,
        stop_reason=row.tokens[-1] if row.ended in ("stop", "tool_calls") else None,
        prompt_logprobs=_prompt_logprobs(row) if new and len(row.tokens) == 1 else None,
    )


def _prompt_logprobs(row: _Row) -> tuple[TokenLogprob | None, ...] | None:
    if row.index or row.request.sampling.prompt_logprobs is None:
        return None
    return (None, *map(_logprob, row.request.prompt_token_ids[1:]))


def _logprob(token_id: int) -> TokenLogprob:
    token = word(token_id)
    best = TopLogprob(token_id, token, token.encode(), -0.5)
    return TokenLogprob(token_id, token, best.bytes, best.logprob, (best,))


def _reason(row: _Row) -> FinishReason | None:
    params = row.request.sampling
    if row.tokens and row.tokens[-1] in params.stop_token_ids:
        return "tool_calls" if row.speech.has_called else "stop"
    return "length" if len(row.tokens) >= params.max_tokens else None
