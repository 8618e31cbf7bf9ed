"""Threads for what would hold the event loop up: reading, tokenizing and compiling what clients sent."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

from penstock.producer.redis.connection import Fields

_T = TypeVar("_T")

READER_THREADS = 2
TOKENIZER_THREADS = 2
CHAT_THREADS = 2  # a chat template renders in as many processes at once
GRAMMAR_THREADS = 2  # grammars are tried in as many processes at once
SMALL_BYTES = 4096  # an entry of this size is read and tokenized sooner than a thread has taken it on


class Wait(Protocol):
    """Waits for what a thread does; it may give up. What no thread has begun by then is not done."""

    def __call__(self, work: asyncio.Future[_T]) -> Awaitable[_T]: ...


async def to_the_end(work: asyncio.Future[_T]) -> _T:
    return await work


class Threads:
    """Chats and grammars have threads of their own: they may take long, and prompts do not wait for them.

    So has reading entries. Nobody knows before it what a request is called, so no deadline and no cancel acts:
    it waits for no prompt either.
    """

    def __init__(self) -> None:
        self._reads = ThreadPoolExecutor(READER_THREADS, thread_name_prefix="penstock-reader")
        self._prompts = ThreadPoolExecutor(TOKENIZER_THREADS, thread_name_prefix="penstock-tokenizer")
        self._chats = ThreadPoolExecutor(CHAT_THREADS, thread_name_prefix="penstock-chat")
        self._grammars = ThreadPoolExecutor(GRAMMAR_THREADS, thread_name_prefix="penstock-grammar")

    def close(self) -> None:
        for threads in (self._reads, self._prompts, self._chats, self._grammars):
            threads.shutdown(wait=False, cancel_futures=True)

    async def read(self, function: Callable[[], _T], fields: Fields) -> _T:
        """What `function` reads in a queue entry; in a thread, unless the entry is small."""
        if _is_small(fields):
            return function()
        return await asyncio.get_running_loop().run_in_executor(self._reads, function)

    async def run(self, function: Callable[[], _T], fields: Fields, wait: Wait = to_the_end) -> _T:
        """What `function` makes of a queue entry; in a thread, unless the entry is small."""
        if _is_small(fields):
            return function()
        return await wait(asyncio.get_running_loop().run_in_executor(self._prompts, function))

    async def run_chat(self, function: Callable[[], _T], wait: Wait = to_the_end) -> _T:
        """Always in a thread: a small chat may make much text."""
        return await wait(asyncio.get_running_loop().run_in_executor(self._chats, function))

    async def run_grammar(self, function: Callable[[], _T], wait: Wait = to_the_end) -> _T:
        """Always in a thread: a small grammar may take long to compile."""
        return await wait(asyncio.get_running_loop().run_in_executor(self._grammars, function))


def _is_small(fields: Fields) -> bool:
    return sum(map(len, fields.values())) <= SMALL_BYTES
