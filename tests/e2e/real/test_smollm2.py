"""A real model, SmolLM2-135M-Instruct, is fetched and served through everything: `make test-real`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio

from penstock.engine.loading.naming.resolving import resolve
from penstock.local.embedded import EmbeddedServer
from penstock.local.worker_process import local_worker, wait_joined
from penstock.producer import AsyncClient
from tests.cli.cli_process import penstock
from tests.support.programs.gateway_harness import running_gateway

pytestmark = [pytest.mark.real, pytest.mark.timeout(1800), pytest.mark.asyncio(loop_scope="module")]

MODEL = "smollm2"
WORKER: dict[str, Any] = {
    "queue": "default", "name": "real", "model": MODEL, "dtype": "float32", "max_num_seqs": 8, "max_batch_tokens": 256,
    "num_pages": 600, "max_model_len": 6000, "health_port": 0, "drain_timeout_s": 5, "log_level": "warning",
}  # fmt: skip
QUESTIONS = (
    "What is the capital of France?", "Name three colours.", "Write one sentence about rivers.", "What is 2 + 3?",
    "Who wrote Hamlet?", "Translate 'good morning' into French.", "List the months of spring.",
    "Explain what a queue is.", "Give me a synonym of 'quick'.", "Why is the sky blue?",
)  # fmt: skip
NUM_TOKENS = 24
SCHEMA = {
    "type": "object", "required": ["name", "age"], "additionalProperties": False,
    "properties": {
        "name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
}  # fmt: skip


@dataclass(frozen=True)
class Served:
    redis_url: str
    client: AsyncClient
    openai: openai.AsyncOpenAI
    path: Path


def chat(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(compile_cache: Path) -> AsyncIterator[Served]:
    """The model behind a queue and a gateway, in float32, as it comes from the cache or by pip."""
    path = await asyncio.to_thread(resolve, MODEL)
    async with AsyncExitStack() as stack:
        server = stack.enter_context(EmbeddedServer())
        settings = {**WORKER, "compile_cache_dir": str(compile_cache)}
        worker = await stack.enter_async_context(local_worker(server.url, settings))
        await wait_joined(worker, server.url, WORKER["queue"], WORKER["name"])
        gateway = await stack.enter_async_context(running_gateway(server.url))
        client = await stack.enter_async_context(AsyncClient(server.url))
        over_http = openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", timeout=600)
        yield Served(server.url, client, await stack.enter_async_context(over_http), path)


async def test_it_writes_what_transformers_writes(served: Served) -> None:
    prompts = [await served.client.tokenize(chat(question)) for question in QUESTIONS]
    replies = await asyncio.gather(
        *(served.client.generate(list(prompt), max_tokens=NUM_TOKENS, temperature=0) for prompt in prompts)
    )
    expected = await asyncio.to_thread(greedy, served.path, prompts)
    same = [reply.tokens == tokens[: len(reply.tokens)] for reply, tokens in zip(replies, expected, strict=True)]
    assert same == [True] * len(QUESTIONS)
    assert min(len(reply.tokens) for reply in replies) > 3


def greedy(path: Path, prompts: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Returns the tokens that transformers writes after each prompt, with the file's weights in float32."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    lacking = model.load_state_dict(tensors, strict=False)
    assert (lacking.missing_keys, lacking.unexpected_keys) == (["lm_head.weight"], [])  # tied to the embedding
    model.eval()
    written = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        with torch.no_grad():
            out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_TOKENS, do_sample=False)
        written.append(tuple(out[0, len(prompt) :].tolist()))
    return written


async def test_a_chat_over_turns_streams(served: Served) -> None:
    messages: list[Any] = []
    for question in ("What is the capital of France?", "And of Italy?"):
        messages += chat(question)
        stream = await served.openai.chat.completions.create(
            model=MODEL, messages=messages, temperature=0, max_tokens=40, stream=True
        )
        parts = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
        assert len(parts) > 3
        messages.append({"role": "assistant", "content": "".join(parts)})
    assert "Paris" in messages[1]["content"]
    assert "Rome" in messages[3]["content"]


async def test_an_answer_follows_a_schema(served: Served) -> None:
    completion = await served.openai.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Describe a person called Anna who is 31 years old, as JSON."}],
        response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}},
        temperature=0,
        max_tokens=60,
    )
    person = json.loads(completion.choices[0].message.content or "")
    assert person.keys() == {"name", "age"}
    assert isinstance(person["age"], int)


async def test_two_hundred_prompts_by_map(served: Served, tmp_path: Path) -> None:
    rows, output = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    rows.write_text("".join(f"{json.dumps({'prompt': f'What is {n} plus {n}?'})}\n" for n in range(200)))
    arguments = ("map", str(rows), str(output), "--max-tokens", "8", "--temperature", "0")
    outcome = await asyncio.wait_for(penstock(*arguments, PENSTOCK_REDIS_URL=served.redis_url), 600)
    assert outcome.status == 0, outcome.err
    written = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["reply_row"] for row in written] == list(range(1, 201))
    assert all(row["reply_text"] for row in written)


async def test_a_long_prompt_is_read_to_its_end(served: Served) -> None:
    story = "The river runs past the old mill and under the stone bridge. " * 280
    text = f"{story}\nThe secret word is marmalade.\nWhat is the secret word?"
    reply = await served.client.generate(chat(text), max_tokens=30, temperature=0)
    assert reply.usage.prompt_tokens > 3500
    assert "marmalade" in reply.text.lower()
    again = await served.client.generate(chat(text), max_tokens=30, temperature=0)
    assert (again.text, again.usage.cached_tokens > 3000) == (reply.text, True)


async def test_the_gateway_names_it(served: Served) -> None:
    assert [model.id async for model in await served.openai.models.list()] == [MODEL]
