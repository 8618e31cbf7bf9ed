"""A reader of tool calls that has read more than its server kept gets every byte once, with the real engine.

What the dead worker published comes from an undisturbed run; what its heir publishes comes from a run that resumes.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.engine import Engine, EngineConfig, Output, Request
from penstock.engine.demo import MODEL_DIR
from penstock.engine.text.response.call_ids import call_id
from penstock.producer import Choice
from penstock.producer.reading.assembly import Assembler
from penstock.protocol.wire import ChunkEntry, EndEntry, GenerateRequest, decode_reply
from penstock.worker.config import WorkerConfig
from penstock.worker.intake.admission import to_engine_request
from penstock.worker.intake.preparation import Preparation, Preparer
from penstock.worker.publish.chunks import chunk_fields
from penstock.worker.run.choices import ChoiceBuffer
from tests.support.packages import ROOT

TEMPLATES = ROOT / "tests/chat_templates"
SIZES = EngineConfig(max_num_seqs=8, max_batch_tokens=64, num_pages=520, decode_steps=1)
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Zürich"]}, "days": {"enum": [1, 20]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "weather", "description": "It.", "parameters": SCHEMA, "strict": True}}
ASKED = GenerateRequest.model_validate(
    {
        "messages": [{"role": "user", "content": "Is it noon?"}],
        "tools": [TOOL],
        "tool_choice": "required",
        "chat_template_kwargs": {"enable_thinking": False},
        "n": 2,
        "seed": 1,
        "temperature": 1.5,
        "max_tokens": 120,
    }
)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory, compile_cache: Path) -> Engine:
    """The demo model, with the template of another family."""
    directory = tmp_path_factory.mktemp("mistral") / "model"
    shutil.copytree(MODEL_DIR, directory)
    shutil.copy(TEMPLATES / "mistral.jinja", directory / "chat_template.jinja")
    return Engine.from_checkpoint(directory, replace(SIZES, compile_cache_dir=compile_cache))


@pytest.fixture(scope="module")
def preparation(engine: Engine) -> Preparation:
    return Preparer(engine.tokenizer, WorkerConfig(), engine.grammars).prepare(ASKED)


def request_of(
    engine: Engine, preparation: Preparation, name: str, generated: tuple[tuple[int, ...], ...] = ()
) -> Request:
    asked = ASKED.model_copy(update={"id": name})
    return to_engine_request(asked, preparation, engine.defaults, generated)


def run(engine: Engine, requests: Iterable[Request]) -> dict[str, list[Output]]:
    """Runs all requests to their ends, side by side."""
    outputs: dict[str, list[Output]] = {}
    for request in requests:
        outputs[request.id] = []
        engine.add(request)
    while engine.has_work():
        for output in engine.step():
            if output.prefill is None:
                outputs[output.request_id].append(output)
    return outputs


def chunks(buffer: ChoiceBuffer, outputs: Iterable[Output]) -> Iterator[ChunkEntry]:
    """Yields the entries that a worker publishes for one choice, one for each output."""
    for output in outputs:
        buffer.add(output)
        if buffer.is_closed:
            continue
        pending = buffer.take()
        fields = chunk_fields(buffer, pending, num_choices=2)
        entry = decode_reply(dict(zip(fields[::2], fields[1::2], strict=True)))
        assert isinstance(entry, ChunkEntry)
        yield entry
        buffer.num_published += len(pending.token_ids)
        buffer.is_closed = buffer.finish_reason is not None


def renamed(outputs: Iterable[Output], name: str) -> Iterator[Output]:
    """Yields the outputs as a request of this name would have them: the ids of its tool calls follow from its name."""
    for output in outputs:
        calls = (
            each if each.id is None else replace(each, id=call_id(name, output.index, each.index))
            for each in output.tool_calls
        )
        yield replace(output, request_id=name, tool_calls=tuple(calls))


def read(entries: Iterable[ChunkEntry], reasons: Sequence[Any], num_tokens: int) -> tuple[Choice, ...]:
    """Returns what a client has in the end; its chunks joined are the same."""
    assembler = Assembler("r")
    parts: dict[tuple[int, int], str] = {}
    for entry in entries:
        for delta in chunk.tool_calls if (chunk := assembler.feed("1-1", entry)) is not None else ():
            key = (entry.index, delta.index)
            assert (delta.id is None) == (key in parts)
            parts[key] = parts.get(key, "") + delta.arguments
    assembler.feed("1-2", EndEntry(finish_reason="stop", finish_reasons=tuple(reasons), completion_tokens=num_tokens))
    assert assembler.reply is not None
    for choice in assembler.reply.choices:
        for place, call in enumerate(choice.tool_calls):
            assert parts.pop((choice.index, place)) == call.arguments
    assert not parts
    return assembler.reply.choices


def test_whatever_token_was_the_last(engine: Engine, preparation: Preparation) -> None:
    """One of two choices dies some tokens before the other. The reader may have read more than the server kept."""
    outputs = run(engine, [request_of(engine, preparation, "calm")])["calm"]
    calm = [[output for output in outputs if output.index == index] for index in range(2)]
    tokens = [tuple(token for output in each for token in output.token_ids) for each in calm]
    reasons = [each[-1].finish_reason for each in calm]
    assert all(len(output.token_ids) == 1 for each in calm for output in each)
    places = [
        tuple(min(max(0, at - 5 * index), len(tokens[index])) for index in range(2))
        for at in range(max(map(len, tokens)))
    ]
    heirs = run(
        engine,
        (
            request_of(engine, preparation, f"r{at}", tuple(tokens[index][: place[index]] for index in range(2)))
            for at, place in enumerate(places)
        ),
    )
    for at, place in enumerate(places):
        name = f"r{at}"
        expected = read(
            (entry for index in range(2) for entry in chunks(ChoiceBuffer(index), renamed(calm[index], name))),
            reasons,
            sum(map(len, tokens)),
        )
        for num_forgotten in (0, 4):
            entries: list[ChunkEntry] = []
            for index in range(2):
                seen = renamed(calm[index][: place[index] + num_forgotten], name)
                entries += chunks(ChoiceBuffer(index), seen)
                has_ended = place[index] == len(tokens[index])
                heir = ChoiceBuffer(index, num_published=place[index], is_closed=has_ended)
                entries += chunks(heir, (output for output in heirs[name] if output.index == index))
            assert read(entries, reasons, sum(map(len, tokens))) == expected
    assert {"tool_calls"} <= set(reasons) <= {"tool_calls", "length"}
    calls = [call.arguments for choice in expected for call in choice.tool_calls]
    whole = [json.loads(arguments) for arguments in calls if arguments.endswith("}")]
    assert len(whole) == 2
    assert len(calls) == 3  # one choice begins a second one and is cut off in it
    assert all(arguments["days"] in (1, 20) for arguments in whole)
