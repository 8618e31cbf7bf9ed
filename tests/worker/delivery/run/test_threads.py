"""Work that is done in threads, and work on the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from penstock.worker.threads import CHAT_THREADS, SMALL_BYTES, TOKENIZER_THREADS, Threads

LARGE = {b"prompt": b"x" * (SMALL_BYTES + 1)}


@pytest.fixture
def threads() -> Iterator[Threads]:
    threads = Threads()
    yield threads
    threads.close()


def name() -> str:
    return threading.current_thread().name


@pytest.mark.parametrize("size", [0, SMALL_BYTES])
async def test_a_small_entry_is_not_worth_a_thread(threads: Threads, size: int) -> None:
    assert await threads.run(name, {b"prompt": b"x" * size}) == threading.main_thread().name


async def test_a_large_entry_and_any_chat_have_threads_of_their_own(threads: Threads) -> None:
    assert (await threads.run(name, LARGE)).startswith("penstock-tokenizer")
    assert (await threads.run_chat(name)).startswith("penstock-chat")


@pytest.mark.parametrize("is_chat", [False, True])
async def test_what_fails_in_a_thread_fails_for_its_caller(threads: Threads, is_chat: bool) -> None:
    def fail() -> None:
        raise LookupError("no template")

    with pytest.raises(LookupError, match="no template"):
        await (threads.run_chat(fail) if is_chat else threads.run(fail, LARGE))


class Held:
    """Work that occupies threads until `go`."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self._started = threading.Semaphore(0)

    def __call__(self) -> str:
        self._started.release()
        self.go.wait()
        return "done"

    async def started(self, count: int) -> None:
        for _ in range(count):
            await asyncio.to_thread(self._started.acquire)


@pytest.fixture
def held() -> Iterator[Held]:
    held = Held()
    yield held
    held.go.set()  # or no thread would ever end


async def test_prompts_go_past_chats_that_take_long(threads: Threads, held: Held) -> None:
    chats = [asyncio.create_task(threads.run_chat(held)) for _ in range(CHAT_THREADS)]
    await held.started(CHAT_THREADS)
    assert (await threads.run(name, LARGE)).startswith("penstock-tokenizer")
    assert not any(chat.done() for chat in chats)
    held.go.set()
    assert await asyncio.gather(*chats) == ["done"] * CHAT_THREADS


async def test_what_is_read_goes_past_prompts_that_take_long(threads: Threads, held: Held) -> None:
    prompts = [asyncio.create_task(threads.run(held, LARGE)) for _ in range(TOKENIZER_THREADS)]
    await held.started(TOKENIZER_THREADS)
    assert (await threads.read(name, LARGE)).startswith("penstock-reader")
    assert await threads.read(name, {}) == threading.main_thread().name
    assert not any(prompt.done() for prompt in prompts)
    held.go.set()
    await asyncio.gather(*prompts)


async def test_closing_waits_for_nobody_and_starts_nothing_more(threads: Threads, held: Held) -> None:
    running = [asyncio.create_task(threads.run(held, LARGE)) for _ in range(TOKENIZER_THREADS)]
    await held.started(TOKENIZER_THREADS)
    waiting = asyncio.create_task(threads.run(held, LARGE))
    await asyncio.sleep(0)
    threads.close()
    await asyncio.wait({waiting})
    assert waiting.cancelled()
    held.go.set()
    assert await asyncio.gather(*running) == ["done"] * TOKENIZER_THREADS
