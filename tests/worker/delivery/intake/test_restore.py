"""A claimed request becomes one that the engine can run, or ends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from redis import exceptions
from structlog.testing import capture_logs

from penstock.engine import SamplingParams
from penstock.engine.driver import DriverStopped
from penstock.engine.generation_defaults import GenerationDefaults
from penstock.engine.text.conversation import Conversation, EncodedChat
from penstock.engine.text.fewest_tokens import Check, let_pass
from penstock.protocol.redis.connection import RedisClient
from penstock.protocol.wire import GenerateRequest, WireError
from penstock.tools.chaos.fake_engine import FakeText
from penstock.worker.intake import restore
from penstock.worker.intake.preparation import Preparer
from penstock.worker.intake.restore import Restorer, ending_failed
from penstock.worker.publish.writes import FinishWrite
from penstock.worker.run.requests import LiveRequest, Phase
from penstock.worker.threads import Threads
from tests.support.redis_servers.streams import add_entry
from tests.worker.delivery.delivery_lab import ENQUEUED_MS, NOW_S, Bench, FixedClock, make_live

pytestmark = pytest.mark.every_server


class BrokenText(FakeText):
    """A tokenizer with a defect."""

    def encode(self, text: str, check: Check = let_pass) -> Sequence[int]:
        raise LookupError(f"no token for {text!r}")

    def encode_chat(self, chat: Conversation, check: Check = let_pass) -> EncodedChat:
        raise LookupError("no template")


class Room:
    """A restorer, and the outbox that takes the ends."""

    def __init__(self, raw: RedisClient, threads: Threads) -> None:
        self.raw = raw
        self.threads = threads
        self.bench = Bench(max_prompt_tokens=10, max_n=4)
        self.outbox = self.bench.outbox

    def claimed(self, live: LiveRequest) -> LiveRequest:
        self.bench.requests.add(live)
        return live

    async def restore(self, live: LiveRequest, text: FakeText | None = None) -> Any:
        defaults = GenerationDefaults((2,), SamplingParams(temperature=0.25))
        preparer = Preparer(text or FakeText(), self.bench.config)
        restorer = Restorer(self.raw, self.bench.config, self.threads, preparer, defaults, self.outbox)
        return await restorer.restore(self.claimed(live))

    async def write(self, index: int, offset: int, tokens: str, **more: str) -> None:
        fields: dict[str, Any] = {
            "type": "chunk",
            "index": index,
            "offset": offset,
            "tokens": tokens,
            "text": "",
            **more,
        }
        await add_entry(self.raw, make_live().reply.key, fields)

    def ends(self) -> list[str | None]:
        """Codes, or else reasons, of the ends that are on their way."""
        batch = self.outbox.collect(NOW_S)
        return [write.end.code or write.end.finish_reason for write in batch if isinstance(write, FinishWrite)]


@pytest.fixture
def room(raw: RedisClient) -> Iterator[Room]:
    threads = Threads()
    yield Room(raw, threads)
    threads.close()


@pytest.fixture(autouse=True)
def stopped(monkeypatch: pytest.MonkeyPatch, clock: FixedClock) -> FixedClock:
    monkeypatch.setattr(restore, "time", clock)
    return clock


@pytest.mark.parametrize("prompt", [{"prompt": "ab"}, {"messages": ({"role": "user", "content": "a"},)}])
async def test_a_new_request_gets_ready(room: Room, prompt: dict[str, Any]) -> None:
    live = make_live(asked=GenerateRequest(id="r", n=2, **prompt))
    request = await room.restore(live)
    assert bytes(request.prompt_token_ids) == (b"ab" if "prompt" in prompt else b"user:a")
    assert (request.id, request.n, request.generated, request.sampling.temperature) == ("r", 2, (), 0.25)
    assert (live.phase, live.prompt_tokens) == (Phase.ADMITTED, len(request.prompt_token_ids))
    assert len(live.choices) == 2
    assert room.ends() == []


@pytest.mark.parametrize(
    ("entry_id", "now_s"), [("1700000000500-3", 1_700_000_000.5), (f"{2**64 - 1}-0", 2**64 / 1000)]
)
async def test_each_owner_gives_the_template_the_same_present(room: Room, entry_id: str, now_s: float) -> None:
    class Watching(FakeText):
        def __init__(self) -> None:
            self.seen: list[float | None] = []

        def encode_chat(self, chat: Conversation, check: Check = let_pass) -> EncodedChat:
            self.seen.append(chat.now_s)
            return super().encode_chat(chat, check)

    text = Watching()
    asked = GenerateRequest(id="r", messages=({"role": "user", "content": "a"},))
    for server_ms in (ENQUEUED_MS + 900, ENQUEUED_MS + 60_000):
        await room.restore(make_live(asked=asked, entry_id=entry_id, server_ms=server_ms), text)
    assert text.seen == pytest.approx([now_s] * 2)


async def test_a_reply_is_not_read_where_the_claim_found_none(room: Room) -> None:
    await room.write(0, 0, "1,2")
    assert (await room.restore(make_live())).generated == ()


async def test_what_was_published_is_not_generated_again(room: Room) -> None:
    await room.write(0, 0, "1,2")
    await room.write(1, 0, "9", finish_reason="stop")
    live = make_live(n=2, has_journal=True)
    request = await room.restore(live)
    assert request.generated == ((1, 2), (9,))
    assert [choice.num_published for choice in live.choices] == [2, 1]
    assert (live.is_resumed, live.phase) == (True, Phase.ADMITTED)


async def test_only_the_end_was_missing(room: Room) -> None:
    await room.write(0, 0, "1", finish_reason="length")
    await room.write(1, 0, "9", finish_reason="stop")
    live = make_live(n=2, has_journal=True)
    assert await room.restore(live) is None
    assert (live.prompt_tokens, live.completion_tokens) == (1, 2)
    assert room.ends() == ["length"]


async def test_one_that_was_cancelled_does_not_run(room: Room) -> None:
    assert await room.restore(make_live(is_cancelled=True), BrokenText()) is None
    assert room.ends() == ["cancelled"]


async def test_one_whose_time_is_up_does_not_run(room: Room, stopped: FixedClock) -> None:
    asked = GenerateRequest(id="r", prompt="x", timeout_s=1.0)  # half of it went by before the claim
    stopped.now_s += 0.5
    assert await room.restore(make_live(asked=asked), BrokenText()) is None
    assert room.ends() == ["expired"]


async def test_one_whose_time_is_not_up_runs_until_it_is(room: Room, stopped: FixedClock) -> None:
    asked = GenerateRequest(id="r", prompt="x", timeout_s=1.0)
    stopped.now_s += 0.49
    live = make_live(asked=asked)
    assert await room.restore(live) is not None
    assert live.deadline_s == NOW_S + 0.5


@pytest.mark.parametrize("more", [{}, {"is_cancelled": True}])
async def test_one_that_takes_its_workers_down_is_given_up(room: Room, more: dict[str, Any]) -> None:
    live = make_live(strikes=room.bench.config.max_attempts, **more)
    assert await room.restore(live, BrokenText()) is None
    assert live.is_dead
    assert live.error is not None
    assert live.error[1].startswith(f"{room.bench.config.max_attempts} workers in a row died")
    assert room.ends() == ["too_many_crashes"]


async def test_one_that_cannot_be_read_ends_with_its_error_and_becomes_a_letter(room: Room) -> None:
    live = make_live(asked=WireError("invalid_request", "max_tokens: many", request_id="r"))
    assert await room.restore(live) is None
    assert (live.error, live.is_dead) == (("invalid_request", "max_tokens: many"), True)
    assert room.ends() == ["invalid_request"]


@pytest.mark.parametrize(
    ("fields", "code", "message"),
    [
        ({"prompt": "x" * 11}, "too_long", "11 tokens"),
        ({"prompt": "x", "n": 5}, "invalid_request", "n is 5"),
        ({"messages": ({"role": "assistant", "content": "a"},)}, "invalid_request", "the assistant's"),
    ],
)
async def test_what_is_over_a_limit_or_refused_is_no_letter(
    room: Room, fields: dict[str, Any], code: str, message: str
) -> None:
    live = make_live(asked=GenerateRequest(id="r", **fields))
    assert await room.restore(live) is None
    assert live.error is not None
    assert (live.error[0], live.is_dead) == (code, False)
    assert message in live.error[1]
    assert room.ends() == [code]


async def test_a_reply_that_nobody_can_continue_ends(room: Room) -> None:
    await room.write(0, 3, "1")
    live = make_live(has_journal=True)
    with capture_logs() as logs:
        assert await room.restore(live) is None
    assert room.ends() == ["reply_unreadable"]
    assert [log["event"] for log in logs] == ["reply_unreadable"]


@pytest.mark.parametrize("prompt", [{"prompt": "ab"}, {"messages": ({"role": "user", "content": "a"},)}])
async def test_what_nobody_expects_ends_one_request_and_is_told_to_the_log_alone(
    room: Room, prompt: dict[str, Any]
) -> None:
    live = make_live(asked=GenerateRequest(id="r", **prompt))
    with capture_logs() as logs:
        assert await room.restore(live, BrokenText()) is None
    assert live.error is not None
    assert live.error[0] == "internal_error"
    assert "no t" not in live.error[1]
    assert [(log["event"], log["log_level"]) for log in logs] == [("admission_failed", "error")]
    assert room.ends() == ["internal_error"]


async def test_while_the_server_is_in_trouble_the_request_is_unknown_and_its_entry_stays(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: Any, **__: Any) -> None:
        raise exceptions.ConnectionError("gone")

    monkeypatch.setattr(restore, "read_journal", fail)
    live = make_live(has_journal=True)
    with pytest.raises(exceptions.ConnectionError, match="gone"):
        await room.restore(live)
    assert live.is_gone
    assert not len(room.bench.requests)
    assert (room.ends(), room.outbox.leaving) == ([], set())


def test_an_engine_that_stopped_is_no_fault_of_the_request(room: Room) -> None:
    live = room.claimed(make_live())
    with pytest.raises(DriverStopped), ending_failed(live, room.outbox):
        raise DriverStopped("ended")
    assert not live.has_ended
    assert list(room.bench.requests) == [live]


async def test_one_that_another_worker_takes_meanwhile_is_let_go_of_quietly(room: Room) -> None:
    class Overtaken(FakeText):
        def encode(self, text: str, check: Check = let_pass) -> Sequence[int]:
            room.bench.requests.let_go(live)
            return super().encode(text, check)

    live = make_live()
    with capture_logs() as logs:
        assert await room.restore(live, Overtaken()) is None
    assert live.is_gone
    assert (logs, room.ends()) == ([], [])


async def test_a_cluster_that_cannot_be_reached_is_no_fault_of_the_request(room: Room) -> None:
    live = room.claimed(make_live())
    with pytest.raises(exceptions.RedisClusterException), ending_failed(live, room.outbox):
        raise exceptions.RedisClusterException("no node in reach")
    assert room.ends() == []
    assert room.bench.requests.get(live.id) is None
