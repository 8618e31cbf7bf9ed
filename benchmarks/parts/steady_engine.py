"""Engines that stand in for a model, or watch one, while the service around them is measured."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from penstock.engine.driver import StepEngine
from penstock.engine.generation_defaults import GenerationDefaults
from penstock.engine.request import FinishReason, Output, Request
from penstock.engine.stats import EngineStats
from penstock.engine.text.conversation import Conversation, EncodedChat
from penstock.engine.text.fewest_tokens import Check, let_pass
from penstock.worker.service import Model

_TEXT = " word"


class SteadyEngine:
    """Gives every running sequence a token per step, with a step every `step_s`, at the least possible cost.

    Its thread sleeps between steps, as if it waited for a device.
    """

    def __init__(self, max_num_seqs: int, step_s: float) -> None:
        self.max_num_seqs = max_num_seqs
        self._step_s = step_s
        self._next_s = 0.0
        self._rows: dict[str, _Row] = {}
        self._ended: list[Output] = []
        self._num_steps = 0
        self._num_generated = 0

    def check(self, request: Request) -> None:
        """Accepts every request."""

    def enqueue(self, request: Request) -> None:
        self._rows[request.id] = _Row(request.sampling.max_tokens, len(request.prompt_token_ids))

    def abort(self, request_id: str, reason: FinishReason) -> None:
        row = self._rows.pop(request_id, None)
        if row is not None:
            self._ended.append(Output(request_id, 0, row.num_tokens, (), "", None, reason, None, row.num_prompt, 0))

    def slack_s(self) -> float:
        return 0.0

    def has_work(self) -> bool:
        return bool(self._rows or self._ended)

    def step(self) -> list[Output]:
        now_s = time.perf_counter()
        time.sleep(max(0.0, self._next_s - now_s))
        self._next_s = max(now_s, self._next_s) + self._step_s
        outputs, self._ended = self._ended, []
        token = (self._num_steps % 1000,)
        for request_id, row in list(self._rows.items()):
            offset = row.num_tokens
            row.num_tokens += 1
            reason: FinishReason | None = None
            if row.num_tokens >= row.max_tokens:
                reason = "length"
                del self._rows[request_id]
            outputs.append(Output(request_id, 0, offset, token, _TEXT, None, reason, None, row.num_prompt, 0))
        self._num_steps += 1
        self._num_generated += len(outputs)
        return outputs

    def stats(self) -> EngineStats:
        return EngineStats(
            num_running=len(self._rows), steps_total=self._num_steps, generated_tokens_total=self._num_generated
        )


@dataclass(slots=True)
class _Row:
    max_tokens: int
    num_prompt: int
    num_tokens: int = 0


class SteadyText:
    """A tokenizer with one token per character."""

    vocab_size = 1 << 20
    special_token_ids: Mapping[str, int] = MappingProxyType({})

    def encode(self, text: str, check: Check = let_pass) -> Sequence[int]:
        return tuple(range(len(text)))

    def encode_chat(self, chat: Conversation, check: Check = let_pass) -> EncodedChat:
        text = "".join(message["content"] for message in chat.messages)
        return EncodedChat(tuple(range(len(text))), text)

    def decode(self, token_ids: Sequence[int]) -> str:
        return "." * len(token_ids)

    decode_prompt = spell_all = decode


def steady_model(engine: StepEngine) -> Model:
    return Model(engine, SteadyText(), GenerationDefaults(eos_token_ids=()))


class TimedEngine:
    """An engine that records how long it had work, and its tokens in that time."""

    def __init__(self, engine: StepEngine) -> None:
        self._engine = engine
        self.check = engine.check
        self.enqueue = engine.enqueue
        self.abort = engine.abort
        self.has_work = engine.has_work
        self.slack_s = engine.slack_s
        self.stats = engine.stats
        self.num_tokens = 0
        self.in_steps_s = 0.0
        self.working_s = 0.0  # in steps, and between two steps if work was left
        self._left_s: float | None = None  # when the last step ended, if work was left

    @property
    def max_num_seqs(self) -> int:
        return self._engine.max_num_seqs

    def step(self) -> list[Output]:
        entered_s = time.perf_counter()
        outputs = self._engine.step()
        now_s = time.perf_counter()
        self.in_steps_s += now_s - entered_s
        self.working_s += now_s - (entered_s if self._left_s is None else self._left_s)
        self.num_tokens += sum(len(output.token_ids) for output in outputs)
        self._left_s = now_s if self._engine.has_work() else None
        return outputs
