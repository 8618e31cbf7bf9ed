"""An iterable of the caller's thread, consumed in the loop's thread."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterable, AsyncIterator, Iterator, Sized

import pytest

from penstock.producer.blocking.feed import drive
from penstock.producer.blocking.loop_thread import LoopThread

PATIENCE_S = 60


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    loop = LoopThread("test-loop")
    yield loop
    loop.stop()


async def doubled(items: AsyncIterable[int]) -> AsyncIterator[int]:
    async for item in items:
        yield 2 * item


def test_results_come_through(loop: LoopThread) -> None:
    assert list(drive(loop, range(5), doubled)) == [0, 2, 4, 6, 8]
    assert list(drive(loop, iter(()), doubled)) == []


def test_the_source_is_read_in_the_caller_s_thread_and_no_further_than_asked(loop: LoopThread) -> None:
    threads, given = set(), []

    def source() -> Iterator[int]:
        for number in range(100):
            threads.add(threading.current_thread())
            given.append(number)
            yield number

    results = drive(loop, source(), doubled)
    assert [next(results) for _ in range(3)] == [0, 2, 4]
    assert given == [0, 1, 2]
    assert threads == {threading.current_thread()}
    results.close()  # type: ignore[attr-defined]  # it is a generator


def test_more_results_than_items(loop: LoopThread) -> None:
    async def twice(items: AsyncIterable[int]) -> AsyncIterator[int]:
        async for item in items:
            yield item
            yield item
        yield -1

    assert list(drive(loop, [1, 2], twice)) == [1, 1, 2, 2, -1]


@pytest.mark.parametrize(("source", "length"), [([1, 2, 3], 3), (iter([1, 2, 3]), None)], ids=["list", "iterator"])
def test_a_known_length_is_known_there_too(loop: LoopThread, source: list[int], length: int | None) -> None:
    seen = []

    def consume(items: AsyncIterable[int]) -> AsyncIterator[int]:
        seen.append(len(items) if isinstance(items, Sized) else None)
        return doubled(items)

    assert list(drive(loop, source, consume)) == [2, 4, 6]
    assert seen == [length]


def test_errors_of_both_sides_reach_the_caller(loop: LoopThread) -> None:
    def broken() -> Iterator[int]:
        yield 1
        raise OSError("no more rows")

    async def refuses(items: AsyncIterable[int]) -> AsyncIterator[int]:
        async for item in items:
            if item == 2:
                raise LookupError("not 2")
            yield item

    with pytest.raises(OSError, match="no more rows"):
        list(drive(loop, broken(), doubled))
    with pytest.raises(LookupError, match="not 2"):
        list(drive(loop, [1, 2, 3], refuses))


def test_leaving_early_closes_the_consumer(loop: LoopThread) -> None:
    closed = threading.Event()

    async def watched(items: AsyncIterable[int]) -> AsyncIterator[int]:
        try:
            async for item in items:
                yield item
        finally:
            closed.set()

    for _ in drive(loop, range(100), watched):
        break
    assert closed.wait(PATIENCE_S)
