"""Ids of rows are the same in each run, and nobody else's; `map` pays for no row twice."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from penstock.producer import AsyncClient, GenerateRequest, ReplyGone, RowIds
from penstock.protocol import keys
from penstock.protocol.redis.connection import RedisClient
from tests.support.patience import eventually
from tests.support.programs.fakes import ScriptedReply, ScriptedWorker, echo, until_cancelled

KEY = "0123456789abcdef"


def ids_of(*requests: GenerateRequest, key: str = KEY, model: str = "m") -> list[str]:
    ids = RowIds(key, model=model)
    return [ids.of(request) for request in requests]


def test_an_id_follows_from_key_model_prompt_options_and_the_equal_rows_before() -> None:
    row, other = GenerateRequest(prompt="a", max_tokens=3), GenerateRequest(prompt="b", max_tokens=3)
    first, second, third = ids_of(row, other, row)
    assert len({first, second, third}) == 3
    assert ids_of(other, row, row) == [second, first, third]  # rows may be added and moved
    assert ids_of(row.model_copy(update={"id": "x", "priority": 3, "keep_s": 90.0, "tenant": "t"})) == [first]
    others = [
        ids_of(row.model_copy(update={"temperature": 0.5})),
        ids_of(GenerateRequest(messages=({"role": "user", "content": "a"},), max_tokens=3)),
        ids_of(row, model="n"),
        ids_of(row, key="another key, which nobody knows"),
        [RowIds(KEY, model="m").after(first)],
    ]
    assert len({first, *(each[0] for each in others)}) == 6


@pytest.mark.parametrize(
    ("key", "error"), [("short", "key has 5 bytes"), (b"x" * 15, "key has 15 bytes"), (12, "must be a str or bytes")]
)
def test_a_key_that_could_be_guessed_is_refused(key: str, error: str) -> None:
    with pytest.raises((TypeError, ValueError), match=error):
        RowIds(key)


def test_a_key_in_a_file_is_made_once_and_for_its_owner_alone(tmp_path: Path) -> None:
    row = GenerateRequest(prompt="a")
    first, second = (RowIds.from_file(tmp_path / "key").of(row) for _ in range(2))
    assert first == second != RowIds.from_file(tmp_path / "other").of(row)
    assert [path.stat().st_mode & 0o777 for path in tmp_path.iterdir()] == [0o600, 0o600]
    (tmp_path / "key").write_text("")
    with pytest.raises(ValueError, match="key has 0 bytes"):
        RowIds.from_file(tmp_path / "key")


async def test_a_second_run_gets_the_same_replies_and_generates_nothing(redis_url: str) -> None:
    prompts = ["a", "b", "a"]
    texts = []
    async with ScriptedWorker(redis_url) as worker:
        for _ in range(2):
            async with AsyncClient(redis_url) as client:
                results = client.map(prompts, ids=RowIds(KEY), max_tokens=9)
                texts.append([result.text async for result in results])
        assert len(worker.taken) == 3
    assert texts == [prompts, prompts]


async def test_leaving_early_cancels_nothing_and_the_next_run_joins_what_runs(
    redis_url: str, redis: RedisClient
) -> None:
    may_end = asyncio.Event()

    async def slow(reply: ScriptedReply) -> None:
        await may_end.wait()
        await echo(reply)

    async with ScriptedWorker(redis_url, slow) as worker:
        async with AsyncClient(redis_url) as client:
            run = asyncio.create_task(anext(client.map(["a", "b"], ids=RowIds(KEY))))
            await eventually(lambda: len(worker.taken) == 2)
            run.cancel()
            await asyncio.gather(run, return_exceptions=True)
        assert await redis.keys("*:cancel") == []
        may_end.set()
        async with AsyncClient(redis_url) as client:
            assert [result.text async for result in client.map(["a", "b"], ids=RowIds(KEY))] == ["a", "b"]
        assert len(worker.taken) == 2


async def test_an_expired_reply_is_generated_again_under_another_id_and_then_found(
    redis_url: str, redis: RedisClient
) -> None:
    row_id = RowIds(KEY).of(GenerateRequest(prompt="a"))
    async with ScriptedWorker(redis_url) as worker, AsyncClient(redis_url) as client:
        for _ in range(2):
            assert [result.text async for result in client.map(["a"], ids=RowIds(KEY))] == ["a"]
            await redis.delete(keys.reply("default", row_id), keys.state("default", row_id))
        with pytest.raises(ReplyGone):
            await client.handle(row_id).result()
        assert [result.text async for result in client.map(["a"], ids=RowIds(KEY))] == ["a"]
        assert [request.id for request in worker.taken] == [row_id, RowIds(KEY).after(row_id)]


async def test_a_row_that_failed_has_its_error_and_a_request_keeps_an_id_of_its_own(redis_url: str) -> None:
    async with ScriptedWorker(redis_url, until_cancelled), AsyncClient(redis_url) as client:
        wrong, named = [1.5], GenerateRequest(prompt="b", id="named")
        results = client.map([wrong, named], ids=RowIds(KEY))  # type: ignore[list-item]
        refused = await anext(results)
        await client.handle("named").cancel()
        cancelled = await anext(results)
        assert await anext(results, None) is None
    row = {"text": None, "finish_reason": None, "prompt_tokens": None, "completion_tokens": None}
    assert refused.as_row() == {**row, "error": str(refused.error)}
    assert cancelled.as_row() == {
        "text": "begun", "finish_reason": "cancelled", "prompt_tokens": 1, "completion_tokens": 5, "error": None
    }  # fmt: skip
