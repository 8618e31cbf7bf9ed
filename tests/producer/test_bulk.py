"""`map` is bounded, in order or as completed, and one failure does not touch others."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Iterator

import pytest

from penstock.producer import AsyncClient, GenerateRequest, ReplyTimeout, RequestFailed, RequestRefused
from penstock.producer.bulk import READ_AHEAD
from penstock.producer.progress import BulkProgress
from penstock.producer.request import Prompt
from penstock.protocol import keys
from penstock.protocol.redis.connection import RedisClient
from tests.support.patience import eventually
from tests.support.programs.fakes import ScriptedReply, ScriptedWorker, echo


class Gates:
    """A worker's behaviour that answers each prompt when the test says so."""

    def __init__(self) -> None:
        self.waiting: dict[str, asyncio.Event] = {}
        self.most_at_once = 0

    async def __call__(self, reply: ScriptedReply) -> None:
        prompt = reply.request.prompt or ""
        await reply.own()
        self.waiting[prompt] = gate = asyncio.Event()
        self.most_at_once = max(self.most_at_once, len(self.waiting))
        await gate.wait()
        del self.waiting[prompt]
        await reply.chunk(prompt)
        await reply.end()

    async def open(self, prompt: str) -> None:
        await eventually(lambda: prompt in self.waiting)
        self.waiting[prompt].set()


async def test_results_come_in_order(redis_url: str) -> None:
    async with ScriptedWorker(redis_url), AsyncClient(redis_url) as client:
        results = [result async for result in client.map([f"p {number}" for number in range(50)], max_in_flight=8)]
    assert [(result.index, result.prompt, result.text) for result in results] == [
        (number, f"p {number}", f"p {number}") for number in range(50)
    ]
    assert all(result.error is None for result in results)


async def test_results_come_as_completed(redis_url: str) -> None:
    gates = Gates()
    async with ScriptedWorker(redis_url, gates), AsyncClient(redis_url) as client:
        results = client.map(["a", "b", "c"], ordered=False)
        for prompt in "cab":
            opening = asyncio.create_task(gates.open(prompt))
            result = await anext(results)
            assert (result.index, result.text) == ("abc".index(prompt), prompt)
            await opening
        assert [result async for result in results] == []


async def test_no_more_are_in_flight_than_allowed(redis_url: str) -> None:
    gates = Gates()
    async with ScriptedWorker(redis_url, gates), AsyncClient(redis_url) as client:
        done = asyncio.create_task(_collect(client.map(list("abcdefgh"), max_in_flight=3, ordered=False)))
        await eventually(lambda: len(gates.waiting) == 3)
        for prompt in "abcdefgh":
            await gates.open(prompt)
        assert len(await done) == 8
    assert gates.most_at_once == 3


async def test_prompts_are_read_only_as_far_as_needed(redis_url: str) -> None:
    num_read = 0

    def endless() -> Iterator[str]:
        nonlocal num_read
        while True:
            num_read += 1
            yield str(num_read)

    async with ScriptedWorker(redis_url), AsyncClient(redis_url) as client:
        results = client.map(endless(), max_in_flight=2)
        assert (await anext(results)).text == "1"
        await asyncio.sleep(0.1)  # the consumer is slow: results pile up to the bound and no further
        assert num_read <= 2 * READ_AHEAD + 2
        assert (await anext(results)).text == "2"
        await results.aclose()


async def test_prompts_may_come_from_an_async_iterable(redis_url: str) -> None:
    async def prompts() -> AsyncIterator[str]:
        for text in "ab":
            await asyncio.sleep(0)
            yield text

    async with ScriptedWorker(redis_url), AsyncClient(redis_url) as client:
        assert [result.text async for result in client.map(prompts(), max_tokens=3)] == ["a", "b"]


async def test_nothing_in_nothing_out(redis_url: str) -> None:
    async with AsyncClient(redis_url) as client:
        assert [result async for result in client.map([])] == []


@pytest.mark.parametrize("ordered", [True, False])
async def test_a_prompt_that_fails_leaves_the_others_alone(redis_url: str, ordered: bool) -> None:
    async def behave(reply: ScriptedReply) -> None:
        if reply.request.prompt == "break":
            await reply.own()
            await reply.end("error", code="engine_error", message="it broke")
        elif reply.request.prompt != "ignore":
            await echo(reply)

    prompts: list[Prompt] = ["a", "break", [], "ignore", "b"]
    async with ScriptedWorker(redis_url, behave), AsyncClient(redis_url) as client:
        found = {result.index: result async for result in client.map(prompts, ordered=ordered, timeout=3)}
    assert [found[index].text for index in (0, 4)] == ["a", "b"]
    errors = [found[index].error for index in (1, 2, 3)]
    assert [type(error) for error in errors] == [RequestFailed, RequestRefused, ReplyTimeout]
    assert all(found[index].reply is None for index in (1, 2, 3))
    with pytest.raises(RequestFailed, match="it broke"):
        _ = found[1].text


async def test_it_waits_while_the_queue_is_full(redis_url: str) -> None:
    async with AsyncClient(redis_url, max_queue_length=2) as client:
        done = asyncio.create_task(_collect(client.map([str(number) for number in range(6)], max_in_flight=6)))
        await asyncio.sleep(0.15)
        async with ScriptedWorker(redis_url):
            results = await done
    assert [result.text for result in results] == [str(number) for number in range(6)]


async def test_progress_is_told_to_a_function(redis_url: str) -> None:
    seen: list[BulkProgress] = []
    async with ScriptedWorker(redis_url), AsyncClient(redis_url) as client:
        await _collect(client.map(["a b", "c", []], max_in_flight=2, progress=seen.append))
    assert {now.total for now in seen} == {3}
    assert max(now.in_flight for now in seen) == 2
    assert [now.done for now in seen] == sorted(now.done for now in seen)
    last = seen[-1]
    assert (last.done, last.failed, last.in_flight, last.completion_tokens) == (3, 1, 0, 4)
    assert last.rate == pytest.approx(3 / last.elapsed_s)


async def test_the_total_of_a_stream_is_known_at_its_end(redis_url: str) -> None:
    seen: list[BulkProgress] = []
    async with ScriptedWorker(redis_url), AsyncClient(redis_url) as client:
        await _collect(client.map(iter(["a", "b"]), progress=seen.append))
    assert (seen[0].total, seen[-1].total) == (None, 2)


async def test_a_bar_is_shown_on_stderr(redis_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    async with ScriptedWorker(redis_url), AsyncClient(redis_url) as client:
        await _collect(client.map(["a", "b", "c"], progress=True))
    out, err = capsys.readouterr()
    assert out == ""
    assert "3/3" in err
    assert "0 in flight, 0 failed" in err


async def test_leaving_the_loop_cancels_what_is_in_flight(redis: RedisClient, redis_url: str) -> None:
    async def behave(reply: ScriptedReply) -> None:
        if reply.request.prompt == "quick":
            await echo(reply)

    async with ScriptedWorker(redis_url, behave) as worker, AsyncClient(redis_url) as client:
        async for result in client.map(["quick", "slow", "slow"]):
            assert result.text == "quick"
            await eventually(lambda: len(worker.taken) == 3)
            break
        gc.collect()
        slow = [request.id or "" for request in worker.taken if request.prompt == "slow"]
        await eventually(lambda: redis.exists(*(keys.cancel("default", request_id) for request_id in slow)))


async def test_mistakes_of_the_caller_end_the_loop(redis_url: str) -> None:
    def broken() -> Iterator[str]:
        yield "a"
        raise OSError("the file is gone")

    def complain(progress: BulkProgress) -> None:
        raise LookupError("a callback's own mistake")

    async with ScriptedWorker(redis_url), AsyncClient(redis_url) as client:
        with pytest.raises(OSError, match="the file is gone"):
            await _collect(client.map(broken()))
        with pytest.raises(LookupError):
            await _collect(client.map(["a"], progress=complain))
        with pytest.raises(TypeError, match="max_tokens"):
            await _collect(client.map([GenerateRequest(prompt="a")], max_tokens=3))
        with pytest.raises(ValueError, match="max_in_flight 0"):
            await _collect(client.map(["a"], max_in_flight=0))
        with pytest.raises(ValueError, match="'same'"):
            await _collect(client.map(["a", "b"], id="same"))


async def _collect(results: AsyncIterator[object]) -> list:  # type: ignore[type-arg]
    return [result async for result in results]
