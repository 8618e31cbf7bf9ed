"""Drives a coroutine that consumes an iterable, while the iterable itself is read in the caller's thread."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Iterable, Iterator, Sized
from typing import Final, Generic, TypeVar

from penstock.producer.blocking.loop_thread import LoopThread

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def drive(
    loop: LoopThread,
    source: Iterable[_Item],
    consume: Callable[[AsyncIterable[_Item]], AsyncIterator[_Result]],
) -> Iterator[_Result]:
    """Yields what `consume` yields in the loop's thread, for an iterable that belongs to the caller's thread.

    The source may be tied to its thread, such as a database cursor, or a generator that makes blocking calls. It is
    asked for an item only while the caller waits for a result.
    """
    exchange = _Exchange(consume, len(source) if isinstance(source, Sized) else None)
    try:
        items = iter(source)
        while (step := loop.call(exchange.step())) is not _END:
            if step is _WANT:
                loop.call(exchange.give(next(items, _END)))
            else:
                yield step  # type: ignore[misc]  # neither of the two marks, so a result
    finally:
        loop.post(exchange.close)


class _Mark:
    """A value that can't be an item or a result."""


_WANT: Final = _Mark()
_END: Final = _Mark()


class _Exchange(Generic[_Item, _Result]):
    """The meeting point of the two sides. All methods run in the loop."""

    def __init__(self, consume: Callable[[AsyncIterable[_Item]], AsyncIterator[_Result]], length: int | None) -> None:
        self._wanted = asyncio.Event()
        self._items: asyncio.Queue[_Item | _Mark] = asyncio.Queue()
        feed = _Feed(self._given()) if length is None else _SizedFeed(self._given(), length)
        self._results = consume(feed)
        self._next: asyncio.Task[_Result | _Mark] | None = None

    async def step(self) -> _Result | _Mark:
        """Returns the next result, or a mark that an item is wanted or that the end is reached."""
        if self._next is None:
            self._next = asyncio.create_task(self._next_result())
        wanted = asyncio.create_task(self._wanted.wait())
        try:
            await asyncio.wait((self._next, wanted), return_when=asyncio.FIRST_COMPLETED)
        finally:
            wanted.cancel()
        if self._wanted.is_set():
            self._wanted.clear()
            return _WANT
        done, self._next = self._next, None
        return done.result()

    async def give(self, item: _Item | _Mark) -> None:
        self._items.put_nowait(item)

    async def close(self) -> None:
        if self._next is not None:
            self._next.cancel()
            await asyncio.wait((self._next,))
        if isinstance(self._results, AsyncGenerator):
            await self._results.aclose()

    async def _given(self) -> AsyncIterator[_Item]:
        while True:
            self._wanted.set()
            item = await self._items.get()
            if isinstance(item, _Mark):
                return
            yield item

    async def _next_result(self) -> _Result | _Mark:
        return await anext(self._results, _END)


class _Feed(AsyncIterable[_Item]):
    def __init__(self, items: AsyncIterator[_Item]) -> None:
        self._items = items

    def __aiter__(self) -> AsyncIterator[_Item]:
        return self._items


class _SizedFeed(_Feed[_Item]):
    """A feed of known length, so that progress can be shown against it."""

    def __init__(self, items: AsyncIterator[_Item], length: int) -> None:
        super().__init__(items)
        self._length = length

    def __len__(self) -> int:
        return self._length
