"""A deterministic engine without a model: any reader can tell whether a reply is right, whole and in order.

Token i of a choice is a hash of (prompt, seed or request id, choice, i), and its text is a short word. So what a
request must give is known from the request alone, whatever workers it ran on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from penstock.engine.errors import InvalidRequest, PromptTooLong
from penstock.engine.generation_defaults import GenerationDefaults
from penstock.engine.request import FinishReason, Output, Request, TokenLogprob
from penstock.engine.stats import EngineStats
from penstock.worker.service import Model

VOCAB_SIZE = 4096
POISON = 0  # a prompt with this token (a NUL in its text) ends the engine with an error
_SYLLABLES = ("ba", "do", "fi", "gu", "ké", "lo", "mi", "nu", "pa", "ro", "si", "tu", "vä", "wo", "xi", "日")


def word(token: int) -> str:
    return " " + _SYLLABLES[token >> 8 & 15] + _SYLLABLES[token >> 4 & 15] + _SYLLABLES[token & 15]


def expected_tokens(prompt: Sequence[int], source: str | int, index: int, count: int, start: int = 0) -> list[int]:
    """Tokens [start, count) of choice `index`; `source` is the request's seed, or its id if it has none."""
    key = blake2b(repr((tuple(prompt), str(source), index)).encode(), digest_size=16).digest()
    return [
        int.from_bytes(blake2b(key + str(at).encode(), digest_size=4).digest(), "big") % VOCAB_SIZE
        for at in range(start, count)
    ]


def expected_text(prompt: str, source: str | int, count: int, index: int = 0) -> str:
    """The whole text of a choice that has `count` tokens, for a prompt as `FakeText` encodes it."""
    return "".join(word(token) for token in expected_tokens(prompt.encode(), source, index, count))


class FakeText:
    """A byte tokenizer."""

    vocab_size = 256

    def encode(self, text: str) -> Sequence[int]:
        return tuple(text.encode())

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(token_ids).decode(errors="replace")

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> Sequence[int]:
        if messages[-1]["role"] != "user":
            raise InvalidRequest(f"the last message must be the user's, not the {messages[-1]['role']}'s")
        return self.encode("|".join(f"{message['role']}:{message['content']}" for message in messages))


@dataclass(slots=True)
class _Row:
    request: Request
    index: int
    prefill_left: int
    held: str = ""  # text of the last token, when it is held back
    ended: FinishReason | None = None
    tokens: list[int] = field(default_factory=list)


class FakeEngine:
    """A `StepEngine`. Each step gives every running sequence one token.

    Args:
        max_num_seqs: sequences that run at once; the others wait.
        max_model_len: prompt tokens that are refused beyond this.
        prefill_steps: steps a new sequence takes before its first token.
        step_s: how long a step takes.
        holds_back: the text of a sequence is one token late, as if each could begin a stop string.
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
        self.most_rows = 0  # sequences that were ever here at once, running and waiting
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
        """Lets `steps` more steps make progress, or all to come."""
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
            row = _Row(request, index, self._prefill_steps, tokens=generated)
            if self._holds_back and generated:
                row.held = word(generated[-1])  # an earlier run has given out all text before it
            self._rows.append(row)
        self.most_rows = max(self.most_rows, len(self._rows))

    def abort(self, request_id: str, reason: FinishReason) -> None:
        for row in self._rows:
            if row.request.id == request_id:
                row.ended = reason

    def has_work(self) -> bool:
        return bool(self._rows)

    def step(self) -> list[Output]:
        if not self._may_go_on():
            time.sleep(0.001)  # a device that takes its time, but aborts are seen
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
        return [self._output(row, (), "", row.ended) for row in aborted]

    def _advance(self, row: _Row) -> Output:
        params, prompt = row.request.sampling, row.request.prompt_token_ids
        new: tuple[int, ...] = ()
        row.ended = _reason(row)
        if row.ended is None:
            source = row.request.id if params.seed is None else params.seed
            at = len(row.tokens)
            new = tuple(expected_tokens(prompt, source, row.index, at + 1, at))
            row.tokens += new
            self._generated += 1
            row.ended = _reason(row)
        text = "".join(map(word, new))
        if self._holds_back:
            text, row.held = row.held, text
            if row.ended is not None:
                text += row.held
        return self._output(row, new, text, row.ended)

    def _output(self, row: _Row, new: tuple[int, ...], text: str, reason: FinishReason | None) -> Output:
        wants = row.request.sampling.logprobs
        return Output(
            row.request.id,
            row.index,
            offset=len(row.tokens) - len(new),
            token_ids=new,
            text=text,
            logprobs=None if wants is None else tuple(TokenLogprob(-0.5, ((token, -0.5),)) for token in new),
            finish_reason=reason,
            num_prompt_tokens=len(row.request.prompt_token_ids),
            num_cached_tokens=min(4, len(row.request.prompt_token_ids)),
        )


def fake_model(engine: FakeEngine | None = None) -> Model:
    """What a worker service loads in tests."""
    return Model(engine or FakeEngine(), FakeText(), GenerationDefaults(eos_token_ids=()))


def _reason(row: _Row) -> FinishReason | None:
    params = row.request.sampling
    if row.tokens and row.tokens[-1] in params.stop_token_ids:
        return "stop"
    return "length" if len(row.tokens) >= params.max_tokens else None
