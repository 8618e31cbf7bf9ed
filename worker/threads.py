"""Threads for work that would block the event loop: reading, tokenizing and compiling what clients sent."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

from penstock.protocol.redis.connection import Fields

_T = TypeVar("_T")

READER_THREADS = 2
TOKENIZER_THREADS = 2
CHAT_THREADS = 2  # chat templates render in as many processes at once
GRAMMAR_THREADS = 2  # grammars are compiled in as many processes at once
SMALL_BYTES = 4096  # an entry of this size is read and tokenized faster than it is handed to a thread


class Wait(Protocol):
    """Waits for a thread's work, and may give up. Work that no thread has begun by then is dropped."""

    def __call__(self, work: asyncio.Future[_T]) -> Awaitable[_T]: ...


async def to_the_end(work: asyncio.Future[_T]) -> _T:
    return await work


class Threads:
    """Runs work in threads. Chats and grammars have their own, as they may take long: prompts do not wait for them.

    So has reading entries: before an entry is read, its id is unknown, and no deadline or cancellation acts.
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
        """Reads a queue entry; in a thread, unless it is small."""
        if _is_small(fields):
            return function()
        return await asyncio.get_running_loop().run_in_executor(self._reads, function)

    async def run(self, function: Callable[[], _T], fields: Fields, wait: Wait = to_the_end) -> _T:
        """Handles a queue entry; in a thread, unless it is small."""
        if _is_small(fields):
            return function()
        return await wait(asyncio.get_running_loop().run_in_executor(self._prompts, function))

    async def run_chat(self, function: Callable[[], _T], wait: Wait = to_the_end) -> _T:
        """Handles a chat in a thread: even a small one may produce much text."""
        return await wait(asyncio.get_running_loop().run_in_executor(self._chats, function))

    async def run_grammar(self, function: Callable[[], _T], wait: Wait = to_the_end) -> _T:
        """Handles a grammar in a thread: even a small one may take long."""
        return await wait(asyncio.get_running_loop().run_in_executor(self._grammars, function))


def _is_small(fields: Fields) -> bool:
    return sum(map(len, fields.values())) <= SMALL_BYTES
