"""Runs a load on an engine in this process, with nothing in between."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

from penstock.engine.driver import StepEngine
from penstock.engine.progress import ReportProgress, silent
from penstock.engine.request import Output, Request, SamplingParams
from penstock.engine.text.conversation import Conversation, EncodedChat
from penstock.tools.bench.recorder import Recorder, Timeline, end, fail, note
from penstock.tools.bench.traffic.datasets import Said
from penstock.tools.bench.traffic.load import Load


class PromptEncoder(Protocol):
    """Turns prompts into token ids; `engine.Engine.tokenizer` does."""

    def encode(self, text: str) -> Sequence[int]: ...

    def encode_chat(self, chat: Conversation) -> EncodedChat: ...


def run_on_engine(engine: StepEngine, text: PromptEncoder, load: Load, progress: ReportProgress = silent) -> Recorder:
    """Drives `engine` until every request of `load` has ended.

    A request that arrives during a step waits for the end of the step, and that wait counts.

    Raises:
        RequestError: the engine can never serve one of the requests.
    """
    requests = [
        Request(
            str(place),
            _token_ids(text, request.said()),
            SamplingParams(
                temperature=load.temperature, max_tokens=request.max_tokens, ignore_eos=request.ignore_eos, seed=place
            ),
            priority=request.priority,
        )
        for place, request in enumerate(load.requests)
    ]
    for request in requests:
        engine.check(request)
    times_s, limit = load.times_s(), load.arrivals.concurrency
    recorder = Recorder()
    running: dict[str, Timeline] = {}
    num_sent = 0
    while num_sent < len(requests) or running:
        elapsed_s = time.perf_counter() - recorder.start_s
        while num_sent < len(requests) and times_s[num_sent] <= elapsed_s and (limit is None or len(running) < limit):
            running[str(num_sent)] = recorder.arrive(None if limit is not None else times_s[num_sent])
            engine.enqueue(requests[num_sent])
            num_sent += 1
        if not engine.has_work():
            time.sleep(max(0.0, times_s[num_sent] - elapsed_s))
            continue
        if (slack_s := engine.slack_s()) > 0.0:
            time.sleep(slack_s)  # requests that arrive meanwhile are in the next step
            continue
        outputs = engine.step()
        _note(running, outputs, time.perf_counter())
        progress(num_sent - len(running), len(requests), f"{len(running)} running")
    return recorder


def _note(running: dict[str, Timeline], outputs: Sequence[Output], now_s: float) -> None:
    for output in outputs:
        timeline = running[output.request_id]
        note(timeline, len(output.token_ids), now_s)
        if output.finish_reason is None:
            continue
        del running[output.request_id]
        if output.finish_reason == "error":
            fail(timeline, output.error or "error", now_s)
        else:
            end(timeline, output.finish_reason, output.num_prompt_tokens, now_s)


def _token_ids(text: PromptEncoder, prompt: Said) -> tuple[int, ...]:
    if isinstance(prompt, str):
        return tuple(text.encode(prompt))
    ids = tuple(part for part in prompt if isinstance(part, int))
    if ids:
        return ids
    return text.encode_chat(Conversation([part for part in prompt if not isinstance(part, int)])).token_ids
