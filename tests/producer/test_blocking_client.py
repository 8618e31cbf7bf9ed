"""The blocking client works the same from any thread; Ctrl-C and leaving early work."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import redis as blocking_redis

from penstock.producer import Client, ConnectionLost, QueueFull, ReplyTimeout
from penstock.producer.progress import BulkProgress
from penstock.protocol import keys
from tests.support.packages import ROOT
from tests.support.patience import WAIT_S, eventually
from tests.support.programs.fakes import Behaviour, ScriptedReply, ScriptedWorker, echo, until_cancelled

Workers = Callable[..., None]


async def never(reply: ScriptedReply) -> None:
    """Leaves the request alone."""


@pytest.fixture
def start_worker(redis_url: str) -> Iterator[Workers]:
    """Starts a scripted worker in a thread of its own."""
    with contextlib.ExitStack() as stack:

        def start(behave: Behaviour = echo) -> None:
            ready, stop = threading.Event(), threading.Event()

            async def run() -> None:
                async with ScriptedWorker(redis_url, behave):
                    ready.set()
                    await asyncio.to_thread(stop.wait)

            thread = threading.Thread(target=lambda: asyncio.run(run()))
            thread.start()
            stack.callback(thread.join)
            stack.callback(stop.set)
            assert ready.wait(WAIT_S)

        yield start


def wait_for(condition: Callable[[], object]) -> None:
    asyncio.run(eventually(condition))


def test_generate_stream_submit_and_map(redis_url: str, start_worker: Workers) -> None:
    start_worker()
    with Client(redis_url) as client:
        assert client.generate("a b").text == "a b"
        stream = client.stream("a b c")
        assert [chunk.text for chunk in stream] == ["a", " b", " c"]
        assert stream.reply is not None
        assert stream.reply.request_id == stream.request_id
        handle = client.submit("d e")
        assert handle.result(timeout=WAIT_S).text == "d e"
        chunks = list(handle.stream())
        assert [chunk.text for chunk in handle.stream(after=chunks[0].entry_id)] == [" e"]
        assert client.handle(handle.id).state() in ("running", "finished")
        assert [result.text for result in client.map(["x", "y"])] == ["x", "y"]


def test_errors_are_the_same(redis_url: str, start_worker: Workers) -> None:
    start_worker(never)
    with Client(redis_url) as client, pytest.raises(ReplyTimeout):
        client.generate("x", timeout=0.05)  # it may not have been sent by then
    with Client(redis_url, queue="full", max_queue_length=1) as client:
        handle = client.submit("y")
        with pytest.raises(ReplyTimeout):
            handle.result(timeout=0.05)
        with pytest.raises(ReplyTimeout):
            next(handle.stream(timeout=0.05))
        with pytest.raises(QueueFull):
            client.submit("z")


def test_cancel(redis_url: str, start_worker: Workers) -> None:
    start_worker(until_cancelled)
    with Client(redis_url) as client:
        handle = client.submit("x")
        stream = handle.stream()
        assert next(stream).text == "begun"
        handle.cancel()
        assert list(stream) == []
        assert handle.result().finish_reason == "cancelled"


def test_many_threads_share_one_client(redis_url: str, start_worker: Workers) -> None:
    start_worker()
    with Client(redis_url) as client, ThreadPoolExecutor(16) as pool:
        prompts = [f"p {number}" for number in range(100)]
        assert [reply.text for reply in pool.map(client.generate, prompts)] == prompts
        with blocking_redis.Redis.from_url(redis_url) as plain:
            assert [each["name"] for each in plain.client_list()].count("penstock-reader") == 1


@pytest.mark.parametrize("leave", ["break", "close", "with"])
def test_leaving_a_stream_early_ends_its_reading_and_its_request(
    redis_url: str, start_worker: Workers, leave: str
) -> None:
    start_worker(until_cancelled)
    with Client(redis_url) as client, blocking_redis.Redis.from_url(redis_url) as plain:
        stream = client.stream("x")
        request_id = stream.request_id
        if leave == "with":
            with stream:
                next(stream)
        else:
            next(stream)
            if leave == "close":
                stream.close()
                stream.close()
        del stream
        gc.collect()
        wait_for(lambda: plain.exists(keys.cancel("default", request_id)))
        lines = client._session.now().client._transport.reader._lines.values()
        wait_for(lambda: not any(line._followed for line in lines))


def test_map_reads_prompts_in_the_caller_s_thread(redis_url: str, start_worker: Workers) -> None:
    start_worker()
    threads = set()

    with Client(redis_url) as client:

        def prompts() -> Iterator[str]:
            for text in "abcd":
                threads.add(threading.current_thread())
                yield client.generate(text).text  # a blocking call inside the source is fine

        assert [result.text for result in client.map(prompts(), max_in_flight=2)] == list("abcd")
    assert threads == {threading.current_thread()}


def test_map_knows_the_total_and_an_error_of_the_source_comes_through(redis_url: str, start_worker: Workers) -> None:
    start_worker()

    def broken() -> Iterator[str]:
        yield "a"
        raise OSError("the file is gone")

    totals = []
    with Client(redis_url) as client:
        assert len(list(client.map(["a", "b"], progress=lambda now: totals.append(now.total)))) == 2
        with pytest.raises(OSError, match="the file is gone"):
            list(client.map(broken()))
        assert client.generate("still").text == "still"
    assert set(totals) == {2}


def test_leaving_map_early_cancels_the_rest(redis_url: str, start_worker: Workers) -> None:
    start_worker(until_cancelled)
    with Client(redis_url) as client, blocking_redis.Redis.from_url(redis_url) as plain:
        results = client.map(["x", "y"], timeout=0.3)
        assert isinstance(next(results).error, ReplyTimeout)
        del results
        gc.collect()
        wait_for(lambda: len(plain.keys("*:cancel")) == 2)


def test_a_callback_that_blocks_on_the_client_is_told_so(redis_url: str, start_worker: Workers) -> None:
    start_worker()
    with Client(redis_url) as client:

        def ask(now: BulkProgress) -> None:
            client.generate("b")

        with pytest.raises(RuntimeError, match="inside a progress callback"):
            list(client.map(["a"], progress=ask))


def test_closing_ends_the_waits_of_other_threads(redis_url: str, start_worker: Workers) -> None:
    start_worker(never)
    client = Client(redis_url)
    handle = client.submit("x")
    with ThreadPoolExecutor(1) as pool:
        wait = pool.submit(handle.result)
        time.sleep(0.1)
        client.close()
        with pytest.raises(ConnectionLost, match="closed"):
            wait.result(10)
    client.close()
    with pytest.raises(RuntimeError, match="closed"):
        client.generate("y")
    with pytest.raises(RuntimeError, match="closed"):
        handle.result()


def test_a_client_that_is_dropped_or_left_open_at_exit_goes_away(redis_url: str) -> None:
    names = {thread.name for thread in threading.enumerate()}
    client = Client(redis_url)
    client.submit("x")
    del client
    gc.collect()
    wait_for(lambda: {thread.name for thread in threading.enumerate()} <= names)
    code = f"from penstock.producer import Client; client = Client({redis_url!r}); print(client.submit('x').id)"
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )
    assert run.stdout
    assert run.stderr in ("", "no worker serves queue 'default'; its requests wait for one\n")  # if it got as far


def test_ctrl_c_ends_a_blocked_call_and_cancels_its_request(redis_url: str) -> None:
    code = (
        "from penstock.producer import Client\n"
        f"with Client({redis_url!r}) as client:\n"
        "    try:\n"
        "        client.generate('x')\n"
        "    except KeyboardInterrupt:\n"
        "        print('interrupted')\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    with process, blocking_redis.Redis.from_url(redis_url) as plain:
        wait_for(lambda: plain.xlen(keys.requests("default")) == 1)
        os.kill(process.pid, signal.SIGINT)
        out, _ = process.communicate(timeout=WAIT_S)
        assert out == "interrupted\n"
        assert process.returncode == 0
        assert len(plain.keys("*:cancel")) == 1
