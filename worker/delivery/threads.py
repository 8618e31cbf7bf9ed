"""Threads for what would hold the event loop up: reading and tokenizing what clients sent."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from penstock.producer.redis.connection import Fields

_T = TypeVar("_T")

TOKENIZER_THREADS = 2
CHAT_THREADS = 2  # a chat template renders in as many processes at once
SMALL_BYTES = 4096  # an entry of this size is read and tokenized sooner than a thread has taken it on


class Threads:
    """Chats have threads of their own: a template may take long, and prompts do not wait for it."""

    def __init__(self) -> None:
        self._prompts = ThreadPoolExecutor(TOKENIZER_THREADS, thread_name_prefix="penstock-tokenizer")
        self._chats = ThreadPoolExecutor(CHAT_THREADS, thread_name_prefix="penstock-chat")

    def close(self) -> None:
        for threads in (self._prompts, self._chats):
            threads.shutdown(wait=False, cancel_futures=True)

    async def run(self, function: Callable[[], _T], fields: Fields) -> _T:
        """What `function` makes of a queue entry; in a thread, unless the entry is small."""
        if sum(map(len, fields.values())) <= SMALL_BYTES:
            return function()
        return await asyncio.get_running_loop().run_in_executor(self._prompts, function)

    async def run_chat(self, function: Callable[[], _T]) -> _T:
        """Always in a thread: a small chat may make much text."""
        return await asyncio.get_running_loop().run_in_executor(self._chats, function)
