"""`LLM` gives what a worker gives: the same requests run in this process and over Redis."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.engine.demo import MODEL_DIR
from penstock.engine.loading.identity import identify
from penstock.engine.text.tokenizer import Tokenizer
from penstock.local.llm import LLM
from penstock.local.worker_process import local_worker
from penstock.producer import AsyncClient, GenerateRequest, Message, PenstockError, Reply, RequestRefused

SMALL: dict[str, Any] = {"model": "demo", "max_num_seqs": 8, "max_batch_tokens": 64, "num_pages": 520}
STORY = "Tell me a short story about a turtle."
CHAT = (Message(role="user", content="How do you spell river?"),)
BEGUN = (*CHAT, Message(role="assistant", content="It is spelled r-i"))
TOOL = {"type": "function", "function": {"name": "spell", "parameters": {"type": "object"}}}


def request(number: int, **fields: Any) -> GenerateRequest:
    """Makes a request with the same id on both sides: the id is the seed of a request without one."""
    values = {"prompt": STORY, "max_tokens": 40, **fields}
    return GenerateRequest(id=f"r{number}", **{name: value for name, value in values.items() if value is not None})


ASKED: list[dict[str, Any]] = [
    {"temperature": 0},
    {"seed": 1},
    {},
    {"n": 3, "seed": 2},
    {"n": 2},
    {"prompt": None, "messages": CHAT, "temperature": 0},
    {"prompt": None, "prompt_token_ids": (20, 21, 22, 23), "seed": 5},
    {"seed": 3, "stop": ("turtle", "day"), "max_tokens": 100},
    {"n": 2, "seed": 4, "stop": (" a",), "min_tokens": 5},
    {"seed": 5, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": -0.5},
    {"seed": 6, "temperature": 1.5, "top_p": 0.9, "top_k": 20, "min_p": 0.01},
    {"seed": 7, "logprobs": 3},
    {"seed": 8, "logit_bias": {30: 5.0}, "bad_token_ids": (261,), "stop_token_ids": (27,)},
    {"seed": 9, "allowed_token_ids": (20, 21, 22), "ignore_eos": True, "max_tokens": 12},
    {"seed": 10, "regex": "(ab|cd){2,4}!", "temperature": 1.5, "n": 2},
    {"seed": 11, "choice": ("yes", "no", "perhaps"), "echo": True},
    {"seed": 12, "stop": ("e",), "include_stop_str_in_output": True, "skip_special_tokens": False},
    {"prompt": None, "messages": CHAT, "seed": 13, "response_format": {"type": "json_object"}},
    {"prompt": None, "messages": BEGUN, "seed": 14, "continue_final_message": True, "echo": True},
    {"prompt": None, "messages": CHAT, "seed": 15, "tools": [TOOL], "reasoning_effort": "none"},
    {"seed": 16, "prompt_logprobs": 2, "n": 2, "max_tokens": 5, "repetition_penalty": 1.2},
    {"prompt": None, "messages": (Message(role="tool", content="of a call that nobody made"),), "seed": 17},
    {"prompt": None, "messages": CHAT, "seed": 18, "tools": [TOOL], "tool_choice": "required"},
]
REQUESTS = [request(number, **fields) for number, fields in enumerate(ASKED)]
REFUSED = [
    request(100, prompt=""),
    request(101, prompt="x " * 5000),
    request(102, stop_token_ids=(10**6,)),
    request(103, prompt=None, prompt_token_ids=(5, 10**6)),
    request(104, n=9),
    request(106, grammar="start: ("),
    request(107, regex="(a"),
    request(109, prompt=None, messages=CHAT, chat_template_kwargs={"eos_token": "x"}),
    request(110, regex="a+", min_tokens=5),
]


@pytest.fixture(scope="module")
def llm(compile_cache: Path) -> Iterator[LLM]:
    with LLM(**SMALL, compile_cache_dir=compile_cache) as llm:
        yield llm


def told(reply: Reply) -> tuple[Any, ...]:
    """Returns what does not depend on the moment, on what the prefix cache held, or on rounding."""
    choices = tuple((choice.index, choice.text, choice.tokens, choice.finish_reason) for choice in reply.choices)
    usage = reply.usage
    return reply.request_id, reply.finish_reason, choices, usage.prompt_tokens, usage.completion_tokens


def logprobs_of(reply: Reply) -> list[float]:
    """Returns the log-probabilities, which are rounded differently in every batch."""
    return [logprob.logprob for choice in reply.choices for logprob in choice.logprobs or ()]


def prompt_logprobs_of(reply: Reply) -> list[float | None]:
    return [entry.logprob if entry else None for entry in reply.prompt_logprobs or ()]


async def test_text_in_and_out_are_those_of_a_worker(redis_url: str, llm: LLM, compile_cache: Path) -> None:
    results = llm.generate([*REQUESTS, *REFUSED])
    ours = {result.index: result for result in results}
    settings = {**SMALL, "queue": "q", "compile_cache_dir": compile_cache, "health_port": None, "log_level": "warning"}
    settings["max_n"] = 100  # more than the engine's own limit
    async with local_worker(redis_url, settings), AsyncClient(redis_url, queue="q") as client:
        async for theirs in client.map([*REQUESTS, *REFUSED]):
            mine = ours.pop(theirs.index)
            if theirs.reply is None:
                assert refusal(mine.error) == refusal(theirs.error)
            else:
                assert mine.reply is not None, mine.error
                assert told(mine.reply) == told(theirs.reply)
                assert logprobs_of(mine.reply) == pytest.approx(logprobs_of(theirs.reply), abs=1e-3)
                of_prompt = prompt_logprobs_of(theirs.reply)
                assert prompt_logprobs_of(mine.reply) == pytest.approx(of_prompt, abs=1e-3)
                assert len(of_prompt) in (0, theirs.reply.usage.prompt_tokens)
        await calls_are_those_of_the_worker(client, llm)
    assert ours == {}
    assert {result.error is None for result in results[: len(REQUESTS)]} == {True}
    assert {len(logprobs_of(result.reply)) for result in results if result.reply is not None} == {0, 40}
    assert [bool(result.reply and result.reply.prompt_logprobs) for result in results].count(True) == 1
    assert {type(result.error) for result in results[len(REQUESTS) :]} == {RequestRefused}


async def calls_are_those_of_the_worker(client: AsyncClient, llm: LLM) -> None:
    for prompt in (STORY, CHAT):
        tokens = await client.tokenize(prompt)
        assert tokens == await asyncio.to_thread(llm.tokenize, prompt)
        assert await client.count_tokens(prompt) == len(tokens)
        assert await client.detokenize(tokens) == await asyncio.to_thread(llm.detokenize, tokens)
    for request in REQUESTS:
        assert await client.validate(request) == await asyncio.to_thread(llm.validate, request)
    for request in REFUSED:
        with pytest.raises(RequestRefused):
            await client.validate(request)
    card = await client.model_card()
    assert card is not None
    template = (MODEL_DIR / "chat_template.jinja").read_text()
    identity = identify(MODEL_DIR, {"default": template}, Tokenizer.from_dir(MODEL_DIR).rules())
    assert (card.model, card.tokenizer, card.template) == ("demo", identity.tokenizer, identity.template)
    assert (card.weights, card.vocab_size, card.max_model_len) == (identity.weights, 640, 1024)


def refusal(error: PenstockError | None) -> tuple[str | None, str, str]:
    assert isinstance(error, RequestRefused)
    return error.request_id, error.code, error.message


def test_each_prompt_alone_gives_what_it_gives_among_others(llm: LLM) -> None:
    among_others = [told(result.reply) for result in llm.generate(REQUESTS) if result.reply is not None]
    assert among_others == [told(llm.generate(request)) for request in REQUESTS]
    for request in REQUESTS:
        stream = llm.stream(request)
        texts = [""] * request.n
        for chunk in stream:
            texts[chunk.index] += chunk.text
        assert stream.reply is not None
        assert told(stream.reply) == among_others.pop(0)
        assert texts == [choice.text for choice in stream.reply.choices]


def test_greedy_answers_stay_and_sampled_ones_differ(llm: LLM) -> None:
    assert llm.generate("What is 347 + 85?", temperature=0).text == "347 + 85 = 432"
    assert llm.generate(STORY, temperature=0).text == llm.generate(STORY, temperature=0).text
    sampled = llm.generate([STORY] * 8, temperature=1.0, max_tokens=60)  # now and then two stories are the same
    assert len({result.reply.text for result in sampled if result.reply is not None}) > 1
