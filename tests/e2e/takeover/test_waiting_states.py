"""Each cell of the table of waiting states (docs/guarantees.md): real requests in that state, and what acts on them.

What holds a request in its state goes on holding it, and few sweeps suffice: that shows the bound.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from penstock.producer import AsyncClient, CallTimedOut, GenerateRequest, ReplyGone
from penstock.protocol import keys
from penstock.protocol.redis.connection import RedisClient
from penstock.tools.chaos.fake_engine import expected_tokens
from penstock.worker.intake.waiting import COLUMNS, TABLE, table
from penstock.worker.intake.waiting import WaitingState as State
from tests.e2e.takeover.waiting_scenes import (
    ALIKE,
    IDS,
    NUM_TOKENS,
    OLD,
    SCENES,
    Blocked,
    SlowText,
    Stage,
    make_suspect,
)
from tests.support.packages import ROOT
from tests.support.patience import eventually
from tests.support.programs.gateway_client import bare_client, openai_client
from tests.support.programs.gateway_harness import running_gateway
from tests.support.programs.worker_harness import is_queue_empty, read_reply, send
from tests.support.redis_servers.streams import read_stream

CHAT: Any = "/v1/chat/completions"
GUARANTEES = ROOT / "docs/guarantees.md"
SWEEPS = 5  # in 2 s, at intervals of half a second that vary by a quarter
TIMEOUT_S = 0.7
HIGH, LOW = 50, 3  # priorities beside that of the requests
OWN = 9
ITS_OWN: dict[State, dict[str, Any]] = {
    State.SET_ASIDE: {"identity": OLD, "allow_other_fleet": True},
    State.LEFT_ALIKE: {"info": ALIKE},
}
"""What the workers have that alone go on with requests in these states."""

Check = Callable[[Stage, State], Awaitable[None]]


@pytest.fixture
async def stage(redis_url: str, redis: RedisClient, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Stage]:
    async with AsyncClient(redis_url, queue="q") as client:
        yield Stage(redis_url, redis, client, monkeypatch)


async def expires(stage: Stage, state: State) -> None:
    stage.fields["timeout_s"] = TIMEOUT_S
    await _end(stage, state, "expired")


async def is_cancelled(stage: Stage, state: State) -> None:
    """Cancels as the client library does, and requests that were added by hand as docs/wire.md says."""
    await _end(stage, state, "cancelled")


async def _end(stage: Stage, state: State, reason: str) -> None:
    async with SCENES[state](stage):
        ran = stage.ran
        if reason == "cancelled":
            for request_id in IDS:
                await stage.cancel(request_id)
        elif stage.acts is not None:
            await eventually(stage.is_late)
        await stage.let_act()
        sweeps = stage.sweeps
        for request_id in IDS:
            assert await stage.ended(request_id) == reason
        assert state in UNSWEPT or reason == "expired" or stage.sweeps - sweeps <= SWEEPS
        assert stage.ran == ran, "it had its turn"
        stage.release()
        await eventually(lambda: _have_left(stage))


async def _have_left(stage: Stage) -> bool:
    entries = await read_stream(stage.redis, keys.requests("q"))
    return not {fields.get("id") for _, fields in entries} & set(IDS)


async def is_joined(stage: Stage, state: State) -> None:
    async with SCENES[state](stage):
        length = await stage.redis.xlen(keys.requests("q"))
        handle = await stage.client.submit("anything", id="library")
        assert await stage.redis.xlen(keys.requests("q")) == length
        await stage.let_act()
        stage.release()
        expected = expected_tokens(stage.prompt.encode(), "library", 0, stage.num_tokens)
        if state not in ITS_OWN:
            assert list((await handle.result()).choices[0].tokens) == expected
            return
        async with stage.worker(2, is_held=False, **ITS_OWN[state]):
            assert list((await handle.result()).choices[0].tokens) == expected


async def goes_next_by_it(stage: Stage, state: State) -> None:
    """The request goes after those of higher priority and before those of lower priority."""
    stage.fields["priority"] = OWN
    async with SCENES[state](stage):
        await send(stage.redis, id="low", prompt="x", max_tokens=1, priority=LOW)
        await send(stage.redis, id="high", prompt="x", max_tokens=1, priority=HIGH)
        stage.may_sweep.set()
        await stage.held_by(keys.WAITING, *IDS, "low", "high")
        stage.release()
        for request_id in ("high", *IDS, "low"):
            await read_reply(stage.redis, request_id)
    assert stage.ran[-4] == "high"
    assert stage.ran[-1] == "low"


async def holds_up_no_other(stage: Stage, state: State) -> None:
    async with SCENES[state](stage):
        for request_id, priority in (("high", 1000), ("low", -1)):
            await send(stage.redis, id=request_id, prompt="x", max_tokens=1, priority=priority)
        await stage.prefilled("high", "low")
        assert not {*IDS} & {*stage.ran}


async def gives_way(stage: Stage, state: State) -> None:
    stage.fields["priority"] = -5
    async with SCENES[state](stage):
        await send(stage.redis, id="high", prompt="x", max_tokens=1, priority=0)
        await stage.prefilled("high")
        stage.release()
        for request_id in IDS:
            reply = await read_reply(stage.redis, request_id)
            assert reply.tokens() == expected_tokens(request_id.encode(), request_id, 0, NUM_TOKENS)


async def lower_ones_pass(stage: Stage, state: State) -> None:
    """Lower priorities pass until the home is full; then it goes before them again."""
    stage.fields["priority"] = OWN
    async with SCENES[state](stage):
        await send(stage.redis, id="low", prompt="x", max_tokens=1, priority=LOW)
        await stage.prefilled("low")
        await send(stage.redis, id="lower", prompt="x", max_tokens=1, priority=LOW)
        await stage.held_by(keys.WAITING, *IDS, "lower")
        await stage.redis.zrem(keys.room("q"), "home")
        stage.release()
        await read_reply(stage.redis, "lower")
    assert stage.ran[-1] == "lower"


async def goes_first_to_its_own(stage: Stage, state: State) -> None:
    stage.fields["priority"] = OWN
    async with SCENES[state](stage):
        await send(stage.redis, id="low", prompt="x", max_tokens=1, priority=LOW)
        await stage.held_by(keys.WAITING, "low")
        async with stage.worker(1, is_held=False, **ITS_OWN[state]):
            await read_reply(stage.redis, "low")
        assert stage.ran[-1] == "low"


async def goes_next_among_suspects(stage: Stage, state: State) -> None:
    stage.fields["priority"] = OWN
    async with SCENES[state](stage):
        await make_suspect(stage.redis, "low")
        await send(stage.redis, id="low", prompt="x", max_tokens=1, priority=LOW)
        await send(stage.redis, id="other", prompt="x", max_tokens=1, priority=-1)
        await stage.prefilled("other")
        assert stage.ran == ["first", "other"]
        stage.release()
        await read_reply(stage.redis, "low")
    assert stage.ran[-1] == "low"


async def is_joined_or_gone(stage: Stage, state: State) -> None:
    """A request sent again joins the first. After the reply has expired, every way of sending it fails at once."""
    client = stage.client
    tried: dict[str, Any] = {"prompt": "x", "id": "library"}
    await is_joined(stage, State.RUNNING)
    await client.submit(**tried)
    assert (await client.generate(**tried)).choices[0].tokens
    await eventually(lambda: is_queue_empty(stage.redis))
    await stage.redis.delete(keys.reply("q", "library"), keys.state("q", "library"))
    with pytest.raises(ReplyGone):
        await client.submit(**tried)
    with pytest.raises(ReplyGone):
        await client.generate(**tried)
    with pytest.raises(ReplyGone):
        await client.stream(**tried).read_to_end()
    with pytest.raises(ReplyGone):
        await client.handle("library").result()
    (result,) = [each async for each in client.map([GenerateRequest.model_validate(tried)])]
    assert isinstance(result.error, ReplyGone)
    assert not await stage.redis.xlen(keys.requests("q"))


async def call_times_out(stage: Stage, _: State) -> None:
    """Nobody answers late: the worker finds that the time is over."""
    blocked = Blocked()
    stage.on_release(blocked.may_go_on.set)
    async with stage.worker(1, text=SlowText(blocked)):
        with pytest.raises(CallTimedOut):
            await stage.client.count_tokens([{"role": "user", "content": "x"}], timeout=0.3)
        stage.release()
        await eventually(lambda: _are_no_calls(stage))
    answers = [await stage.redis.xlen(key) async for key in stage.redis.scan_iter(keys.answers("q", "*"))]
    assert not any(answers)


async def _are_no_calls(stage: Stage) -> bool:
    return not await stage.redis.xlen(keys.calls("q"))


async def calls_are_answered_each(stage: Stage, _: State) -> None:
    async with stage.worker(1):
        for prompt in ("x", "xy"):
            await stage.redis.xadd(
                keys.calls("q"), {"call": "count_tokens", "prompt": prompt, "id": "same", "to": "box"}
            )
        await eventually(lambda: _has_answers(stage, {"1", "2"}))


async def _has_answers(stage: Stage, counts: set[str]) -> bool:
    found = await read_stream(stage.redis, keys.answers("q", "box"))
    return {fields["prompt_tokens"] for _, fields in found} == counts


async def background_ends(stage: Stage, *, is_cancelled: bool) -> None:
    async with _responding(stage) as http:
        made = await http.post("/v1/responses", json=_body(**({} if is_cancelled else {"timeout_s": TIMEOUT_S})))
        response = made.json()["id"]
        if is_cancelled:
            await http.post(f"/v1/responses/{response}/cancel")

        async def has_ended() -> bool:
            return (await http.get(f"/v1/responses/{response}")).json()["status"] not in ("queued", "in_progress")

        await eventually(has_ended)
        body = (await http.get(f"/v1/responses/{response}")).json()
        assert body["status"] == ("cancelled" if is_cancelled else "failed")
        assert stage.ran == ["first"]


async def background_expires(stage: Stage, _: State) -> None:
    await background_ends(stage, is_cancelled=False)


async def background_is_cancelled(stage: Stage, _: State) -> None:
    await background_ends(stage, is_cancelled=True)


async def background_has_its_priority(stage: Stage, _: State) -> None:
    async with _responding(stage) as http:
        for said, priority in (("low", LOW), ("high", HIGH)):
            await http.post("/v1/responses", json=_body(input=said, priority=priority))
        entries = await read_stream(stage.redis, keys.requests("q"))
        assert [fields.get("priority") for _, fields in entries[1:]] == [str(LOW), str(HIGH)]


async def background_is_joined(stage: Stage, _: State) -> None:
    async with _responding(stage) as http:
        made = [await http.post("/v1/responses", json=_body(), headers={"Idempotency-Key": "k"}) for _ in range(2)]
        assert made[0].json()["id"] == made[1].json()["id"]
        assert await stage.redis.xlen(keys.requests("q")) == 2
        [seen] = [key async for key in stage.redis.scan_iter(keys.seen("q", "k*"))]
        await stage.redis.set(seen, keys.NO_ENTRY, keepttl=True)
        gone = await http.post("/v1/responses", json=_body(), headers={"Idempotency-Key": "k"})
        assert (gone.status_code, gone.json()["error"]["code"]) == (409, "reply_expired")


@asynccontextmanager
async def _responding(stage: Stage) -> AsyncIterator[Any]:
    async with (
        stage.full_worker(model_name="tiny"),
        running_gateway(stage.url) as gateway,
        bare_client(gateway) as http,
    ):
        yield http


def _body(**more: Any) -> dict[str, Any]:
    return {"model": "tiny", "input": "x", "background": True, "max_output_tokens": 4, **more}


async def batch_ends(stage: Stage, *, is_cancelled: bool) -> None:
    """The queue holds one line of the batch at a time, and that one runs on."""
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": 4}
    lines = [{"custom_id": name, "method": "POST", "url": CHAT, "body": chat} for name in ("a", "b")]
    content = "\n".join(map(json.dumps, lines)).encode()
    async with (
        stage.full_worker(model_name="tiny"),
        running_gateway(stage.url, max_batch_lines=1) as gateway,
        openai_client(gateway.url) as openai,
    ):
        file = await openai.files.create(file=("in.jsonl", content), purpose="batch")
        window: Any = "24h" if is_cancelled else "2s"
        batch = await openai.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window=window)

        async def is_in_queue() -> bool:
            return bool(await stage.redis.xlen(keys.requests("q")) == 2)  # with what the worker runs

        async def has_ended() -> bool:
            return (await openai.batches.retrieve(batch.id)).status in ("expired", "cancelled")

        await eventually(is_in_queue)
        if is_cancelled:
            await openai.batches.cancel(batch.id)
        await eventually(has_ended)
        ended = await openai.batches.retrieve(batch.id)
        assert ended.status == ("cancelled" if is_cancelled else "expired")
        bad = (await openai.files.content(ended.error_file_id or "")).text.splitlines()
        codes = {each["custom_id"]: each["error"]["code"] for each in map(json.loads, bad)}
        assert codes == dict.fromkeys("ab", "batch_cancelled" if is_cancelled else "batch_expired")
        assert stage.ran == ["first"]


async def batch_expires(stage: Stage, _: State) -> None:
    await batch_ends(stage, is_cancelled=False)


async def batch_is_cancelled(stage: Stage, _: State) -> None:
    await batch_ends(stage, is_cancelled=True)


IN_LINE = (State.NEW, State.IN_LANE, State.ORPHANED, State.UNOWNED, State.GIVEN_BACK)
WITH_WORKER = (State.READ, State.PREPARING, State.COMPILING)
UNSWEPT = (*WITH_WORKER, State.SUSPECT, State.RUNNING, State.PREEMPTED, State.IN_OUTBOX, State.ORPHANED)
HAVE_SCENES = tuple(state for state in State if state in SCENES)

CHECKS: dict[str, dict[State, Check]] = {
    "deadline": {
        **dict.fromkeys(HAVE_SCENES, expires),
        State.BATCH_LINE: batch_expires,
        State.BACKGROUND: background_expires,
        State.CALL: call_times_out,
    },
    "cancel": {
        **dict.fromkeys(HAVE_SCENES, is_cancelled),
        State.BATCH_LINE: batch_is_cancelled,
        State.BACKGROUND: background_is_cancelled,
    },
    "priority": {
        **dict.fromkeys(IN_LINE, goes_next_by_it),
        **dict.fromkeys(WITH_WORKER, holds_up_no_other),
        **dict.fromkeys((State.RUNNING, State.PREEMPTED), gives_way),
        State.AT_HOME: lower_ones_pass,
        **dict.fromkeys(ITS_OWN, goes_first_to_its_own),
        State.SUSPECT: goes_next_among_suspects,
        State.BACKGROUND: background_has_its_priority,
    },
    "same_id": {
        **dict.fromkeys(HAVE_SCENES, is_joined),
        State.UNREAD: is_joined_or_gone,
        State.BACKGROUND: background_is_joined,
        State.CALL: calls_are_answered_each,
    },
}
CELLS = [
    pytest.param(state, column, id=f"{state.name}-{column}")
    for state in State
    for column in COLUMNS
    if not getattr(TABLE[state], column).is_none
]


@pytest.mark.parametrize(("state", "column"), CELLS)
async def test_it_acts(stage: Stage, state: State, column: str) -> None:
    await CHECKS[column][state](stage, state)


def test_the_page_has_the_table_and_it_has_each_state() -> None:
    assert TABLE.keys() == set(State)
    assert table() in GUARANTEES.read_text()
