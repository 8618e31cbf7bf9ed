"""Requests use a key's limits from their reservation to the end of their replies, whoever reads them."""

from __future__ import annotations

import secrets
from typing import Any

import pytest

from penstock.gateway.keys.limits import Limiter, LimitUsage, OverLimit
from penstock.gateway.keys.published import Published
from penstock.gateway.keys.records import KeyLimits
from penstock.gateway.keys.settling import MAX_DUE, Settling
from penstock.gateway.keys.tabs import Order, Tab
from penstock.gateway.store import names
from penstock.gateway.store.connection import Store
from penstock.producer import ConnectionLost, ServerRefused
from penstock.protocol.redis.connection import RedisClient
from tests.support.patience import eventually
from tests.support.programs.gateway_harness import standing_with
from tests.support.redis_servers.streams import read_scores

A_HUNDRED = KeyLimits(tokens_per_minute=100)
TWO_AT_ONCE = KeyLimits(max_concurrent=2)


class Replies:
    """Replies that workers have published, as a test sets them."""

    def __init__(self) -> None:
        self.known: dict[str, Published] = {}

    async def look(self, _: str, request_id: str) -> Published:
        return self.known.get(request_id, Published("unknown", 0))


def order(
    num_tokens: int = 1,
    num_at_once: int = 1,
    request_id: str | None = None,
    *,
    num_least: int | None = None,
    is_shared: bool = True,
) -> Order:
    tab = Tab("k", "default", request_id or secrets.token_hex(8), is_shared)
    return Order(tab, num_at_once, num_tokens if num_least is None else num_least, num_tokens)


def settling_with(store: Store, replies: Replies | None = None) -> Settling:
    return Settling(store.execute, (replies or Replies()).look, standing_with(store))


async def used(settling: Settling, *orders: Order, limits: KeyLimits = A_HUNDRED) -> int:
    usage = await settling.reserve("k", limits, orders)
    assert isinstance(usage, LimitUsage)
    return usage.used


async def counted(redis: RedisClient) -> int:
    return sum(map(int, (await redis.hgetall(names.key_tokens("k"))).values()))


async def test_a_request_larger_than_the_limit_needs_a_minute_of_its_own(redis_url: str) -> None:
    async with Store(redis_url) as store:
        settling, large = settling_with(store), order(5000)
        assert await used(settling, large) == 100
        with pytest.raises(OverLimit, match="100 tokens in the last minute and about 1 more"):
            await used(settling, order(1))
        await settling.close(large.tab, 40)
        assert await used(settling, order(1)) == 41


async def test_a_request_that_may_take_anything_is_charged_what_is_left(redis_url: str) -> None:
    """So it is let in beside others, none comes in beside it, and the next one need not wait for a minute."""
    async with Store(redis_url) as store:
        settling, small, large = settling_with(store), order(30), order(5000, num_least=9)
        await used(settling, small)
        assert await used(settling, large) == 100
        with pytest.raises(OverLimit, match="100 tokens in the last minute and about 9 more") as refused:
            await used(settling, order(5000, num_least=9))
        assert refused.value.retry_after_s == 5
        await settling.close(large.tab, 40)
        assert await used(settling, order(5000, num_least=30)) == 100
        with pytest.raises(OverLimit, match="about 31 more"):
            await used(settling, order(5000, num_least=31))


async def test_who_can_only_wait_for_the_minute_is_told_so(redis_url: str) -> None:
    async with Store(redis_url) as store:
        settling, spent, small = settling_with(store), order(90), order(5)
        await used(settling, spent)
        await settling.close(spent.tab, 90)
        await used(settling, small)  # even if all of it is given back, the next one does not fit
        with pytest.raises(OverLimit, match="95 tokens") as refused:
            await used(settling, order(20))
        assert refused.value.retry_after_s is not None
        assert refused.value.retry_after_s > 5


async def test_what_was_never_sent_is_not_paid_for(redis: RedisClient, redis_url: str) -> None:
    async with Store(redis_url) as store:
        settling, one = settling_with(store), order(30)
        for _ in range(2):
            assert await used(settling, one) == 30
            await settling.close(one.tab, 0)
            assert await counted(redis) == 0


async def test_a_refused_request_leaves_nothing_behind(redis: RedisClient, redis_url: str) -> None:
    async with Store(redis_url) as store:
        settling = settling_with(store)
        await used(settling, order(60, is_shared=False))
        with pytest.raises(OverLimit):
            await used(settling, order(60, is_shared=False))
        assert await redis.zcard(names.unsettled()) == await redis.hlen(names.key_open("k")) == len(settling._readings)


@pytest.mark.parametrize("num_commands", [1, 2])
async def test_no_tab_is_open_that_nobody_looks_at(redis: RedisClient, redis_url: str, num_commands: int) -> None:
    """Any command may be the last one of a gateway that was killed, or whose request was cut off."""
    async with Store(redis_url) as store:
        sent = 0

        async def cut_off(*command: str | bytes | int) -> Any:
            nonlocal sent
            sent += 1
            if sent > num_commands:
                raise ConnectionLost("cut off")
            answer = await store.execute(*command)
            if sent == num_commands:
                raise ConnectionLost("its answer")
            return answer

        settling, one = Settling(cut_off, Replies().look, standing_with(store)), order(10)
        with pytest.raises(ConnectionLost):
            await used(settling, one)
        open_tabs = await redis.hkeys(names.key_open("k"))
        assert len(open_tabs) == num_commands - 1
        assert {f"k {tab!s}" for tab in open_tabs} <= (await read_scores(redis, names.unsettled())).keys()
        await redis.zadd(names.unsettled(), {one.tab.member: 0})  # as after 15 s
        await settling_with(store)._go_round()
        assert await gone_both(redis)
        assert await counted(redis) == 0


async def test_tokens_beyond_the_reservation_count_when_they_are_known(redis_url: str) -> None:
    async with Store(redis_url) as store:
        settling, small = settling_with(store), order(10)
        await used(settling, small)
        await settling.close(small.tab, 250)
        with pytest.raises(OverLimit, match="250 tokens"):
            await used(settling, order(1))


async def test_what_left_the_minute_is_not_given_back_to_it(redis: RedisClient, redis_url: str) -> None:
    async with Store(redis_url) as store:
        settling, large = settling_with(store), order(90)
        await used(settling, large)
        await redis.delete(names.key_tokens("k"))  # as after a minute
        await settling.close(large.tab, 10)
        assert await counted(redis) == 0


async def test_of_a_list_all_fit_or_none_is_taken(redis: RedisClient, redis_url: str) -> None:
    async with Store(redis_url) as store:
        settling = settling_with(store)
        await used(settling, order(40))
        with pytest.raises(OverLimit, match="40 tokens in the last minute and about 80 more"):
            await used(settling, order(30), order(50))
        assert await counted(redis) == 40
        assert await redis.hlen(names.key_open("k")) == 1


async def test_each_of_n_counts_at_once(redis_url: str) -> None:
    async with Store(redis_url) as store:
        settling, two = settling_with(store), order(num_at_once=2)
        await settling.reserve("k", TWO_AT_ONCE, [two])
        with pytest.raises(OverLimit, match="2 requests are running, API key k may have 2"):
            await settling.reserve("k", TWO_AT_ONCE, [order()])
        await settling.close(two.tab, 9)
        await settling.reserve("k", TWO_AT_ONCE, [order()])
        with pytest.raises(OverLimit, match="1 requests are running, and 2 more are asked for"):
            await settling.reserve("k", TWO_AT_ONCE, [order(), order()])


async def test_more_at_once_than_there_ever_may_be_is_refused_for_good(redis_url: str) -> None:
    async with Store(redis_url) as store:
        with pytest.raises(OverLimit, match="3 are asked for at once") as refused:
            await settling_with(store).reserve("k", TWO_AT_ONCE, [order(num_at_once=2), order()])
    assert not refused.value.may_be_retried


async def test_a_lease_does_not_count_beside_the_tabs_in_its_place(redis: RedisClient, redis_url: str) -> None:
    async with Store(redis_url) as store:
        settling = settling_with(store)
        limiter = Limiter(store.execute, settling.forget_ended, standing_with(store))
        lease, two = await limiter.admit("k", TWO_AT_ONCE), order(num_at_once=2)
        await settling.open(limiter, lease, TWO_AT_ONCE, [two])
        assert not await redis.exists(names.key_running("k"))
        with pytest.raises(OverLimit, match="2 requests are running"):
            await limiter.admit("k", TWO_AT_ONCE)
        await limiter.admit("k", TWO_AT_ONCE, joined_id=two.tab.request_id)  # it reads what runs
        await limiter.release(lease)
        with pytest.raises(OverLimit, match="2 requests are running"):
            await limiter.admit("k", TWO_AT_ONCE)


async def test_who_asks_again_pays_once(redis: RedisClient, redis_url: str) -> None:
    async with Store(redis_url) as one, Store(redis_url) as other:
        here, there, same = settling_with(one), settling_with(other), order(30)
        assert await used(here, same) == await used(there, same) == 30
        await here.close(same.tab, 7)
        assert await used(there, same) == 7
        await there.close(same.tab, 7)
        assert await counted(redis) == 7


async def test_commands_that_run_twice_count_once(redis: RedisClient, redis_url: str) -> None:
    """A command runs twice when its answer was lost."""
    async with Store(redis_url) as store:

        async def twice(*command: str | bytes | int) -> Any:
            await store.execute(*command)
            return await store.execute(*command)

        settling, one = Settling(twice, Replies().look, standing_with(store)), order(10)
        limiter = Limiter(twice, settling.forget_ended, standing_with(store))
        limits = KeyLimits(requests_per_minute=9, max_concurrent=1, tokens_per_minute=100)
        lease = await limiter.admit("k", limits)
        await settling.open(limiter, lease, limits, [one])
        joined = await limiter.admit("k", limits, one.tab.request_id)
        assert joined.requests is not None
        assert (joined.requests.used, await counted(redis)) == (2, 10)
        for num_tokens in (20, 25):
            settling.come(one.tab, num_tokens)
            await settling._go_round()
            assert await counted(redis) == num_tokens
        await settling.close(one.tab, 30)
        assert await counted(redis) == 30


async def test_what_is_read_is_charged_as_it_comes(redis: RedisClient, redis_url: str) -> None:
    async with Store(redis_url) as store:
        settling, capped = settling_with(store), order(5000)
        async with settling.running():
            await used(settling, capped)
            await redis.delete(names.key_tokens("k"))  # as after a minute
            settling.come(capped.tab, 180)
            await eventually(lambda: has_counted(redis, 80))


async def has_counted(redis: RedisClient, num_tokens: int) -> bool:
    return await counted(redis) == num_tokens


async def test_a_reply_that_nobody_reads_is_charged_what_was_published(
    redis: RedisClient, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any gateway charges it: that of its reader was killed."""
    for name in ("ROUND_S", "ATTENDED_S", "WAITING_S", "LOOK_LEASE_S"):
        monkeypatch.setattr(f"penstock.gateway.keys.settling.{name}", 0.02)
    replies = Replies()
    async with Store(redis_url) as killed, Store(redis_url) as store:
        runs, ended, gone = order(5, request_id="runs"), order(5, request_id="ended"), order(5, request_id="gone")
        unsent = order(5, request_id="unsent")
        replies.known = {
            "runs": Published("running", 11), "ended": Published("ended", 2), "gone": Published("ended", None),
        }  # fmt: skip
        await used(settling_with(killed, replies), runs, ended, gone, unsent)
        async with settling_with(store, replies).running():
            await eventually(lambda: has_counted(redis, 11 + 2 + 5))
            assert set(await redis.hkeys(names.key_open("k"))) == {runs.tab.field}
            replies.known["runs"] = Published("ended", 13)
            await eventually(lambda: gone_both(redis))
    assert await counted(redis) == 13 + 2 + 5


async def gone_both(redis: RedisClient) -> bool:
    return not await redis.exists(names.key_open("k")) and not await redis.exists(names.unsettled())


async def test_what_was_left_before_it_was_seen_in_the_queue_may_still_come(redis: RedisClient, redis_url: str) -> None:
    async with Store(redis_url) as store:
        settling, one = settling_with(store), order(5)
        await used(settling, one)
        await settling.leave(one.tab)
        assert await counted(redis) == 5
        assert await redis.zscore(names.unsettled(), one.tab.member)


async def test_one_tab_that_can_t_be_looked_at_holds_up_no_other(redis: RedisClient, redis_url: str) -> None:
    looked: list[str] = []

    async def look(_: str, request_id: str) -> Published:
        looked.append(request_id)
        if request_id == "bad":
            raise ServerRefused("about this one alone")
        return Published("ended", 3)

    async with Store(redis_url) as store:
        killed, settling = settling_with(store), Settling(store.execute, look, standing_with(store))
        orders = [order(1, request_id=str(number)) for number in range(MAX_DUE + 1)] + [order(1, request_id="bad")]
        for each in orders:
            await used(killed, each, limits=KeyLimits(tokens_per_minute=10**6))
        await redis.zadd(names.unsettled(), {each.tab.member: 0 for each in orders})
        await redis.zadd(names.unsettled(), {orders[-1].tab.member: -1})  # the first one
        with pytest.raises(ServerRefused):
            await settling._go_round()
    assert await redis.hkeys(names.key_open("k")) == [orders[-1].tab.field]
    assert len(looked) == len(orders)
    assert await counted(redis) == 3 * (MAX_DUE + 1) + 1


async def test_what_is_read_here_is_nobody_else_s_to_look_at(redis: RedisClient, redis_url: str) -> None:
    """No other gateway charges it, even while it waits to be sent after Redis was away for longer than its tab's
    deadline.
    """
    async with Store(redis_url) as store:
        settling, one = settling_with(store), order(10)
        await used(settling, one)
        await redis.zadd(names.unsettled(), {one.tab.member: 0})
        settling._put_off_s = float("inf")
        await settling._go_round()
        assert await redis.hlen(names.key_open("k")) == 1
        settling._put_off_s = 0.0
        await redis.zadd(names.unsettled(), {one.tab.member: 0})
        await settling._go_round()
        await settling_with(store)._go_round()  # another gateway
        assert await redis.hlen(names.key_open("k")) == 1


async def test_a_tab_of_which_redis_has_lost_the_time_is_looked_at(redis: RedisClient, redis_url: str) -> None:
    replies = Replies()
    async with Store(redis_url) as store:
        settling, one = settling_with(store, replies), order()
        await settling.reserve("k", KeyLimits(max_concurrent=1), [one])
        await redis.delete(names.unsettled())
        replies.known[one.tab.request_id] = Published("running", 1)
        with pytest.raises(OverLimit):
            await settling.reserve("k", KeyLimits(max_concurrent=1), [order(is_shared=False)])
        assert await redis.zrange(names.unsettled(), 0, -1) == [one.tab.member]


async def test_junk_among_the_tabs_is_dropped(redis: RedisClient, raw: RedisClient, redis_url: str) -> None:
    now_s, _ = await redis.time()
    junk: dict[Any, Any] = {
        "x": "",
        "default a": "one two three",
        "default b": "1 2",
        "default old": f"2 - {now_s - 9 * 86_400}",
    }
    await redis.hset(names.key_open("k"), mapping=junk)
    members: list[Any] = ["junk", "a b c d", "  ", "{} b c", b"a b \xff"]
    await raw.zadd(names.unsettled(), dict.fromkeys(members, 1))
    async with Store(redis_url) as store:
        settling = settling_with(store)
        limiter = Limiter(store.execute, settling.forget_ended, standing_with(store))
        await limiter.admit("k", KeyLimits(max_concurrent=1))
        await settling._go_round()
    assert not await redis.exists(names.key_open("k"))
    assert not await redis.exists(names.unsettled())


async def test_tabs_work_on_a_cluster(redis_cluster_url: str) -> None:
    async with Store(redis_cluster_url) as store:
        settling, one = settling_with(store), order(10)
        assert await used(settling, one) == 10
        settling.come(one.tab, 12)
        await settling._go_round()
        await settling.close(one.tab, 30)
        assert await used(settling, order(1)) == 31
