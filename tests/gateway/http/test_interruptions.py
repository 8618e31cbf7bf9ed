"""Answers that are ended from outside."""

from __future__ import annotations

import asyncio

from penstock.gateway.errors import ApiError
from penstock.gateway.http.interruptions import Interruptions

REVOKED = ApiError(401, "revoked")
DRAINING = ApiError(503, "draining")


async def test_the_end_of_a_key_ends_its_answers_and_no_others() -> None:
    interruptions = Interruptions()
    with interruptions.opened("a") as mine, interruptions.opened("b") as other, interruptions.opened() as keyless:
        waiting = asyncio.create_task(mine.wait())
        await asyncio.sleep(0)
        interruptions.end_key("a", REVOKED)
        assert await waiting is REVOKED
        assert (other.error, keyless.error) == (None, None)


async def test_a_drain_ends_all_those_that_begin_later_too() -> None:
    interruptions = Interruptions()
    with interruptions.opened("a") as early, interruptions.opened() as keyless:
        interruptions.end_all(DRAINING)
        assert (await early.wait(), await keyless.wait()) == (DRAINING, DRAINING)
    with interruptions.opened("a") as late:
        assert late.error is DRAINING


async def test_the_first_reason_counts() -> None:
    interruptions = Interruptions()
    with interruptions.opened("a") as mine:
        interruptions.end_key("a", REVOKED)
        interruptions.end_all(DRAINING)
        assert await mine.wait() is REVOKED


async def test_what_is_answered_is_forgotten() -> None:
    interruptions = Interruptions()
    with interruptions.opened("a") as answered:
        pass
    interruptions.end_key("a", REVOKED)
    assert answered.error is None
