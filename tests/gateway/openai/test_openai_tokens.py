"""Questions about prompts, answered by a worker whose tokens are the bytes of the text."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest

from penstock.protocol.redis.connection import RedisClient
from tests.support.patience import WAIT_S
from tests.support.programs.gateway_harness import running_gateway
from tests.support.programs.worker_harness import running_worker


@pytest.fixture
async def http(redis: RedisClient, redis_url: str) -> AsyncIterator[httpx2.AsyncClient]:
    async with (
        running_worker(redis_url, heartbeat_ttl_s=WAIT_S),
        running_gateway(redis_url) as gateway,
        httpx2.AsyncClient(base_url=gateway.url, timeout=WAIT_S) as http,
    ):
        yield http


CHAT = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    "asked", [{"prompt": "hello"}, {"conversation": "hello"}, {"prompt": "hello", "add_special_tokens": True}]
)
async def test_tokens_are_counted(http: httpx2.AsyncClient, asked: Any) -> None:
    answer = await http.post("/v1/count_tokens", json={"model": "q", **asked})
    assert (answer.status_code, answer.json()) == (200, {"model": "q", "count": 5})


async def test_a_chat_is_counted_as_the_model_gets_it(http: httpx2.AsyncClient) -> None:
    counts = [
        (await http.post("/v1/count_tokens", json={"model": "q", name: CHAT})).json()["count"]
        for name in ("messages", "conversation")
    ]
    tokens = (await http.post("/tokenize", json={"model": "q", "messages": CHAT})).json()["tokens"]
    assert counts == [len(tokens), len(tokens)]


async def test_tokens_and_text_are_each_others_inverse(http: httpx2.AsyncClient) -> None:
    answer = (await http.post("/tokenize", json={"model": "q", "prompt": "hi"})).json()
    assert (answer["count"], answer["tokens"]) == (2, list(b"hi"))
    assert "max_model_len" in answer
    text = await http.post("/detokenize", json={"model": "q", "tokens": answer["tokens"]})
    assert text.json() == {"prompt": "hi"}


@pytest.mark.parametrize(
    ("path", "asked", "param"),
    [
        ("/v1/count_tokens", {}, None),
        ("/v1/count_tokens", {"prompt": "a", "messages": CHAT}, None),
        ("/v1/count_tokens", {"prompt": "a", "conversation": "a"}, "conversation"),
        ("/v1/count_tokens", {"prompt": 5}, "prompt"),
        ("/v1/count_tokens", {"promt": "a"}, "promt"),
        ("/tokenize", {"prompt": "a", "return_token_strs": True}, "return_token_strs"),
        ("/tokenize", {"messages": [{"role": "nobody", "content": "a"}]}, "messages[0].role"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {"tokens": [True]}, "tokens[0]"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [10**9]}, None),
    ],
)
async def test_a_question_that_is_none_is_refused(
    http: httpx2.AsyncClient, path: str, asked: Any, param: str | None
) -> None:
    answer = await http.post(path, json={"model": "q", **asked})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
