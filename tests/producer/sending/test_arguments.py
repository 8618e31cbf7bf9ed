"""The client library takes what is passed, or refuses it in the same call with the argument's name and value."""

from __future__ import annotations

import asyncio
import collections
import decimal
import inspect
import math
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, cast, get_type_hints

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from penstock.producer import (
    AsyncClient,
    BadAddress,
    BlockingHandle,
    CallTimedOut,
    Client,
    GenerateRequest,
    Handle,
    ReplyTimeout,
    RequestRefused,
)
from penstock.producer.aio import connections_of
from penstock.producer.arguments import LONGEST_S, MOST
from penstock.producer.connections import MAX_UNREADABLE, Connections
from penstock.producer.environment import URL_VARIABLES
from penstock.producer.request import build_request, check_options
from penstock.protocol.redis.connection import RedisClient
from penstock.protocol.wire import Sampling, in_python
from tests.support import any_json

NOWHERE = "redis://127.0.0.1:1"  # nothing is sent there
CHAT = [{"role": "user", "content": "x"}]
GIVEN: dict[str, Any] = {"prompt": "x", "prompts": ["x"], "token_ids": [1], "request_id": "r1", "queue": "q"}
"""Values for parameters without a default."""

PROMPT_FIELDS = ("prompt", "messages", "prompt_token_ids", "token_ids")

Make = Callable[[], object]

NOBODYS: dict[str, Make] = {
    "nan": lambda: math.nan, "inf": lambda: math.inf, "-inf": lambda: -math.inf, "1e400": lambda: float("1e400"),
    "huge": lambda: 10**5000, "minus huge": lambda: -(10**5000), "decimal nan": lambda: decimal.Decimal("NaN"),
    "complex": lambda: 1j, "object": object, "type": lambda: int, "ellipsis": lambda: ..., "bytes": lambda: b"1",
    "no bytes": lambda: b"", "bytearray": lambda: bytearray(b"1"), "memoryview": lambda: memoryview(b"1"),
    "surrogate": lambda: "\udc80", "surrogate after": lambda: "x\ud800", "bytes within": lambda: [b"1"],
    "null within": lambda: [None], "surrogate within": lambda: ["\udc80"], "nan within": lambda: {"1": math.nan},
    "object within": lambda: {"x": object()}, "once": lambda: iter([1]), "generator": lambda: (n for n in [1]),
}  # fmt: skip
"""Makers of values that no argument takes. A value is made anew each time: some can be read only once."""


def _same(value: object) -> object:
    return value


_VALUES: tuple[object, ...] = (
    None, True, False, 0, 1, -1, 2**31, 2**53 + 1, 2**63, 0.0, 1.0, 1.5, -1e-9, 1e-9, 1e300, decimal.Decimal(1),
    "", "x", "1", "nan", "1e400", "q\n", "\ufeffq", "a\0", "\x1b[0m", "q" * 200, "1-1", "9" * 30 + "-1", [], (), {},
    [1], [-1], [True], [2**63], [10**5000], [[]], {1: 2}, {True: 1}, {1: True}, {1}, range(2),
    collections.deque([1]), {"a": "b"}, CHAT, GenerateRequest(prompt="x"),
)  # fmt: skip
SOMEBODYS: dict[str, Make] = {f"{at}: {in_python(value)}": partial(_same, value) for at, value in enumerate(_VALUES)}
JUNK = {**NOBODYS, **SOMEBODYS}


class Accepted(Exception):
    """Raised where a call would turn to Redis."""


@pytest.fixture
def nobody_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def accept(self: Connections) -> None:
        if inspect.currentframe().f_back.f_code is not AsyncClient.close.__code__:  # type: ignore[union-attr]
            raise Accepted

    monkeypatch.setattr(Connections, "check_loop", accept)
    for name in URL_VARIABLES:
        monkeypatch.delenv(name, raising=False)


@dataclass(frozen=True)
class Site:
    """A parameter of a public callable."""

    kind: type
    method: str
    name: str
    annotation: str

    def __str__(self) -> str:
        return f"{self.kind.__name__}.{self.method}.{self.name}".replace(".__init__", "")


KINDS = (AsyncClient, Client, Handle, BlockingHandle)
INTERNAL = {("Handle", "__init__"), ("BlockingHandle", "__init__")}


def sites() -> Iterator[Site]:
    for kind in KINDS:
        for method, function in inspect.getmembers(kind, inspect.isfunction):
            if (method.startswith("_") and method != "__init__") or (kind.__name__, method) in INTERNAL:
                continue
            for name, parameter in list(inspect.signature(function).parameters.items())[1:]:
                if parameter.kind is not inspect.Parameter.VAR_KEYWORD:
                    yield Site(kind, method, name, parameter.annotation)
                elif method in ("submit", "map"):  # all others hand them on as these do
                    yield from (Site(kind, method, key, str(of)) for key, of in get_type_hints(Sampling).items())


SITES = list(sites())


def test_both_clients_have_the_same_arguments() -> None:
    def parameters(kind: type) -> set[str]:
        return {f"{each.method}.{each.name}" for each in SITES if each.kind is kind}

    assert parameters(Client) == parameters(AsyncClient) - {"on.queue"}
    assert parameters(BlockingHandle) == parameters(Handle)


async def ask(site: Site, value: object, asked: Any = None) -> None:
    """Passes the value, and goes on to where Redis would be asked.

    Raises:
        Accepted: the call came that far.
    """
    if site.method == "__init__":
        client = site.kind(**{"url": NOWHERE, site.name: value})
        if isinstance(client, Client):
            client.close()
        raise Accepted
    call = getattr(asked, site.method)
    function = inspect.signature(call).parameters
    needed = {name: GIVEN[name] for name, each in function.items() if each.default is each.empty and name in GIVEN}
    result = call(**{**needed, site.name: value})
    if inspect.isawaitable(result):
        result = await result
    if isinstance(result, AsyncIterator):
        result = await anext(result, None)
    elif isinstance(result, Iterator):
        result = await asyncio.to_thread(next, result, None)
    if error := getattr(result, "error", None):
        raise error
    raise Accepted


async def check(site: Site, junk: dict[str, Make]) -> None:
    async with AsyncClient(NOWHERE) as client:
        with Client(NOWHERE) as blocking:
            handles = client.handle("r1"), blocking.handle("r1")
            asked = dict(zip(KINDS, (client, blocking, *handles), strict=True))[site.kind]
            for label, make in junk.items():
                value = make()
                if site.name == "progress" and callable(value):
                    continue
                try:
                    await ask(site, value, asked)
                except Accepted:
                    assert not is_refused(site, label, value), (label, "was taken")
                except (TypeError, ValueError, RequestRefused) as error:
                    check_told(site, value, error)
                except Exception as error:
                    raise AssertionError((label, error)) from error


def is_refused(site: Site, label: str, value: object) -> bool:
    """Checks whether the value must be refused, by the parameter's annotation."""
    is_option = site.name in Sampling.__annotations__
    if label in NOBODYS:
        return site.name != "prompts" or label not in ("once", "generator", "null within", "bytes within")
    if value is None:
        return not is_option and "None" not in site.annotation
    if isinstance(value, bool):
        return "bool" not in site.annotation
    if isinstance(value, str) and not is_option:
        return not any(word in site.annotation for word in ("str", "Prompt"))
    return False


def check_told(site: Site, value: object, error: Exception) -> None:
    message = str(error)
    names = PROMPT_FIELDS if site.name.startswith(("prompt", "token")) else (site.name,)
    assert any(name in message.lower() for name in names), message
    assert message.isprintable()
    assert len(message) < 1000
    if site.name not in ("url", "prompts", "id") and not isinstance(error, RequestRefused):
        assert in_python(value) in message


@pytest.mark.parametrize("site", SITES, ids=str)
@pytest.mark.usefixtures("nobody_is_asked")
async def test_junk_is_taken_or_refused_in_the_call(site: Site) -> None:
    await check(site, JUNK)


anything = (
    any_json.values | st.text(st.characters(codec=None)) | st.binary() | st.floats() | st.integers() | st.decimals()
    | st.complex_numbers() | st.sets(st.integers()) | st.builds(iter, st.lists(st.integers()))
    | st.lists(st.floats() | st.booleans() | st.binary()) | st.builds(decimal.Decimal, st.integers())
)  # fmt: skip


@pytest.mark.usefixtures("nobody_is_asked")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(site=st.sampled_from(SITES), value=anything)
def test_so_is_anything_else(site: Site, value: object) -> None:
    asyncio.run(check(site, {"": lambda: value}))


@given(name=st.sampled_from(sorted(Sampling.__annotations__)), value=anything)
@example(name="max_completion_tokens", value=decimal.Decimal("sNaN"))
def test_an_option_is_one_of_each_prompt_or_of_none(name: str, value: object) -> None:
    """If a bulk refuses an option at once, each of its prompts would be refused for it; a request that is made can be
    sent.
    """
    options: Any = {name: value}
    try:
        check_options(options)
    except RequestRefused:
        for prompt in ("x", [1], CHAT):
            with pytest.raises(RequestRefused):
                build_request(prompt, options, fresh_id="r1")
    else:
        entry = build_request(CHAT, options, fresh_id="r1").to_entry()
        assert all(text.encode() for text in entry.values())


def test_options_of_chats_alone_may_be_those_of_many() -> None:
    options: Any = {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "required"}
    check_options(options)
    with pytest.raises(RequestRefused, match="tools is for chats"):
        build_request("x", options, fresh_id="r1")
    with pytest.raises(RequestRefused, match="max_completion_tokens: "):  # as the caller has called it
        check_options({"max_completion_tokens": 0})
    with pytest.raises(RequestRefused, match="max_tokens and max_completion_tokens are the same"):
        check_options(cast("Any", dict.fromkeys(("max_tokens", "max_completion_tokens"), decimal.Decimal("sNaN"))))
    with pytest.raises(RequestRefused, match="messages: there is a prompt already"):
        check_options({"messages": CHAT})  # type: ignore[typeddict-unknown-key]


async def test_what_is_longest_and_most_is_taken_by_the_server(redis: RedisClient, redis_url: str) -> None:
    largest: Any = {"id": None, "max_tokens": 2**63 - 1, "min_tokens": 0, "top_k": 2**63 - 1, "seed": 2**63 - 1}
    longest: Any = {"reconnect_timeout_s": LONGEST_S, "answer_timeout_s": LONGEST_S, "dedupe_window_s": int(LONGEST_S)}
    async with AsyncClient(redis_url, max_queue_length=MOST, **longest) as client:
        handle = await client.submit("x", **largest)
        assert await handle.state() == "queued"
        with pytest.raises(ReplyTimeout, match="within 0 s"):
            await handle.result(timeout=0)
        with pytest.raises(ReplyTimeout, match="within 1e-09 s"):
            await client.generate("x", timeout=1e-9)
        with pytest.raises(CallTimedOut):
            await client.count_tokens("x", timeout=1e-9)


@pytest.mark.parametrize("variable", URL_VARIABLES)
@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("http://secret@x", "the Redis URL has scheme 'http'"),
        ("redis://h\udc80", "the Redis URL has a control character"),
        ("rediss://secret@h?ssl_ca_certs=/no/file", "ssl_ca_certs /no/file of the Redis URL cannot be used"),
        ("", None),
    ],
)
def test_a_url_of_the_environment_is_named_with_its_variable(
    url: str, told: str | None, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, url)
    if told is None:
        assert "redis://localhost:6379" in repr(AsyncClient())
        return
    with pytest.raises(BadAddress) as refused:
        AsyncClient()
    assert str(refused.value).startswith(f"{variable}: {told}")
    assert "secret" not in str(refused.value)


async def test_queues_that_may_not_be_looked_into_leave_nothing_behind(redis: RedisClient, redis_url: str) -> None:
    await redis.execute_command("ACL", "SETUSER", "blind", "on", "nopass", "~*", "&*", "+@all", "-xrange")
    place = redis_url.partition("://")[2]
    async with AsyncClient(f"redis://blind:x@{place}", max_queue_length=None) as client:
        for number in range(MAX_UNREADABLE + 3):
            handle = await client.on(f"q{number}").submit("x")
            assert await handle.state() == "queued"
        known = connections_of(client).unreadable
        assert list(known) == [f"q{number}" for number in range(3, MAX_UNREADABLE + 3)]
        await handle.state()
        assert len(known) == MAX_UNREADABLE
