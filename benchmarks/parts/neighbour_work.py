"""The work that `benchmarks.neighbours` runs beside streams: expensive requests and questions, one kind at a time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import httpx2 as httpx

from penstock.producer import AsyncClient
from penstock.protocol.operations.collector import look
from penstock.protocol.redis.connection import connect

BODY_BYTES = 900_000
VOCAB_SIZE = 8192
LOOPING = "loop"
TEMPLATE = (
    "{% if messages[0]['content'] == '" + LOOPING + "' %}{% for i in range(100000) %}{% for j in range(100000) %}"
    "{% endfor %}{% endfor %}{% endif %}"
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if tools %}<tool_call>{% for t in tools %}{{ t | tojson }}\n{% endfor %}{% endif %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


class Site(NamedTuple):
    """Addresses and names of all parts."""

    redis_url: str
    queue: str
    model: str
    word: str  # id of a token that has text: a stream of it alone has no token without an event
    gateway_url: str
    metrics_urls: tuple[str, ...]  # of the worker and the gateway


Work = Callable[[Site], Awaitable[None]]


def do(name: str, site: Site) -> float:
    """Does one of `WORK`, in its own process; returns seconds."""
    try:
        return asyncio.run(_timed(WORK[name](site)))
    except Exception as error:  # many library errors can't be pickled whole
        raise RuntimeError(f"{type(error).__name__}: {error}") from None


async def _timed(work: Awaitable[None]) -> float:
    start = asyncio.get_running_loop().time()
    await work
    return asyncio.get_running_loop().time() - start


def _posts(path: str, body: Callable[[str], dict[str, Any]], *, count: int, at_once: int) -> Work:
    async def work(site: Site) -> None:
        text = json.dumps(body(site.model))
        gate = asyncio.Semaphore(at_once)

        async def post() -> None:
            async with gate:
                answer = await http.post(f"{site.gateway_url}{path}", content=text)
                if answer.status_code == 404:
                    raise RuntimeError(answer.text)

        limits = httpx.Limits(max_connections=at_once)
        async with httpx.AsyncClient(timeout=120.0, limits=limits) as http:
            await asyncio.gather(*(post() for _ in range(count)))

    return work


def _gets(*, count: int) -> Work:
    async def work(site: Site) -> None:
        async with httpx.AsyncClient(timeout=60.0) as http:
            for _ in range(count):
                for url in site.metrics_urls:
                    (await http.get(url)).raise_for_status()

    return work


async def _top(site: Site) -> None:
    redis = connect(site.redis_url, decode=False)
    for _ in range(100):
        await look(redis, site.queue)
        await asyncio.sleep(0.02)
    await redis.aclose()


async def _cancels(site: Site) -> None:
    gate = asyncio.Semaphore(64)

    async def send() -> None:
        async with gate:
            handle = await client.submit("hello there", max_tokens=64)
            await handle.cancel()

    async with AsyncClient(site.redis_url, queue=site.queue, max_queue_length=None) as client:
        await asyncio.gather(*(send() for _ in range(10_000)))


async def _long_prompt(site: Site) -> None:
    prompt = tuple((i * 7919) % (VOCAB_SIZE - 1) + 1 for i in range(50_000))
    async with AsyncClient(site.redis_url, queue=site.queue) as client:
        await client.generate(prompt, max_tokens=1, timeout=600.0)


def _chat(**fields: Any) -> Callable[[str], dict[str, Any]]:
    return lambda model: {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 16, **fields}


def words(num_bytes: int) -> str:
    """Makes text with hardly two words the same."""
    words, length, place = [], 0, 1
    while length < num_bytes:
        place = place * 1103515245 + 12345 & 0x7FFFFFFF
        words.append("".join("etaoinshrdlcumwf"[place >> shift & 15] for shift in range(0, 28, 4)))
        length += 8
    return " ".join(words)[:num_bytes]


def _schema(count: int) -> dict[str, Any]:
    parts = {f"property_{i}": {"type": "string", "minLength": i % 5, "description": "x" * 40} for i in range(count)}
    return {"type": "object", "properties": parts}


def _tool(place: int) -> dict[str, Any]:
    function = {"name": f"tool_{place}", "description": "d" * 200, "parameters": _schema(10), "strict": True}
    return {"type": "function", "function": function}


WORK: dict[str, Work] = {
    "nothing": lambda _: asyncio.sleep(4.0),
    "1 MB to tokenize": _posts("/tokenize", lambda m: {"model": m, "prompt": words(BODY_BYTES)}, count=24, at_once=8),
    "1 MB of short tokens": _posts(
        "/tokenize", lambda m: {"model": m, "prompt": "!?" * (BODY_BYTES // 2)}, count=12, at_once=4
    ),
    "1 MB to count": _posts(
        "/v1/count_tokens", lambda m: {"model": m, "prompt": words(BODY_BYTES)}, count=24, at_once=8
    ),
    "tokens to detokenize": _posts(
        "/detokenize", lambda m: {"model": m, "tokens": [40] * 225_000}, count=12, at_once=4
    ),
    "1 MB as a chat": _posts(
        "/v1/chat/completions",
        _chat(messages=[{"role": "user", "content": words(BODY_BYTES)}]),
        count=24,
        at_once=8,
    ),
    "1 MB to parse": _posts(
        "/v1/chat/completions", _chat(chat_template_kwargs={"x": [[]] * (BODY_BYTES // 4)}), count=12, at_once=4
    ),
    "200 tools": _posts(
        "/v1/chat/completions", _chat(tools=[_tool(i) for i in range(200)], tool_choice="required"), count=8, at_once=4
    ),
    "schema of 1 MB": _posts(
        "/v1/chat/completions",
        _chat(response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": _schema(8400)}}),
        count=8,
        at_once=4,
    ),
    "looping template": _posts(
        "/v1/chat/completions", _chat(messages=[{"role": "user", "content": LOOPING}]), count=4, at_once=2
    ),
    "prompt logprobs": _posts(
        "/v1/completions",
        lambda m: {"model": m, "prompt": [*range(1, 390)], "max_tokens": 2, "prompt_logprobs": 20},
        count=16,
        at_once=4,
    ),
    "n = 16": _posts("/v1/chat/completions", _chat(n=16, max_tokens=64), count=3, at_once=1),
    "50,000-token prompt": _long_prompt,
    "scrapes": _gets(count=150),
    "top": _top,
    "10,000 cancels": _cancels,
}
