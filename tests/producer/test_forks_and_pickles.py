"""A client goes on in a forked child, and a handle in any process, as gunicorn, Celery and multiprocessing need it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import pickle
import threading
import warnings
from collections.abc import Callable, Iterator

import pytest

from penstock.producer import AsyncClient, BlockingHandle, Client, Handle
from penstock.producer.blocking.loop_thread import LoopThread
from tests.support.patience import WAIT_S
from tests.support.programs.fakes import ScriptedWorker

pytestmark = pytest.mark.versions


@pytest.fixture
def worker(redis_url: str) -> Iterator[None]:
    ready, stop = threading.Event(), threading.Event()

    async def run() -> None:
        async with ScriptedWorker(redis_url):
            ready.set()
            await asyncio.to_thread(stop.wait)

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    assert ready.wait(WAIT_S)
    yield
    stop.set()
    thread.join()


def in_a_child(act: Callable[[], object]) -> str:
    """Returns what the function returns, or the error that it raises, in a fork of this process."""
    end, start = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer Pythons and JAX warn of forks beside threads
        child = os.fork()
    if not child:
        with contextlib.suppress(BaseException):
            os.close(end)
            os.write(start, _outcome(act).encode())
        os._exit(0)  # without what pytest does at the end
    os.close(start)
    with os.fdopen(end, "rb") as pipe:
        said = pipe.read().decode()
    os.waitpid(child, 0)
    return said


def _outcome(act: Callable[[], object]) -> str:
    try:
        return str(act())
    except BaseException as error:
        return f"{type(error).__name__}: {error}"


def test_a_forked_child_has_a_client_of_its_own(redis_url: str, worker: None) -> None:
    with Client(redis_url) as client:
        assert client.generate("before").text == "before"
        handle, stream = client.submit("of the parent"), client.stream("a b")
        next(stream)
        results = client.map(["a"])

        def used_after(close: Callable[[], None]) -> str:
            close()
            close()
            return client.generate("x").text

        acts: list[tuple[Callable[[], object], str]] = [
            (lambda: client.generate("in a child").text, "in a child"),
            (lambda: [result.text for result in client.map(["xy"])], "['xy']"),
            (lambda: handle.result(WAIT_S).text, "of the parent"),
            (lambda: in_a_child(lambda: client.generate("below it").text), "below it"),
            (lambda: used_after(client.close), "RuntimeError: the client is closed"),
            (lambda: next(stream), "RuntimeError: this was begun in the process that this one is a fork of"),
            (lambda: next(results), "RuntimeError: this was begun in the process that this one is a fork of"),
        ]
        for act, expected in acts:
            assert in_a_child(act).startswith(expected)
        assert [chunk.text for chunk in stream] == [" b"]
        assert [result.text for result in results] == ["a"]


def test_what_a_child_forgets_or_closes_stays_with_its_parent(redis_url: str, worker: None) -> None:
    """Closing an inherited connection would take it out of what the parent's event loop watches."""
    clients = [Client(redis_url)]
    streams = [clients[0].stream("a b c")]
    next(streams[0])

    def forget() -> str:
        streams.clear()
        text = clients[0].generate("own").text
        clients.clear()
        gc.collect()
        return text

    def close() -> None:
        with contextlib.suppress(RuntimeError):
            streams[0].close()
        clients[0].close()

    assert in_a_child(forget) == "own"
    assert in_a_child(close) == "None"
    assert [chunk.text for chunk in streams[0]] == [" b", " c"]
    assert clients[0].generate("still there").text == "still there"
    clients[0].close()
    assert in_a_child(lambda: clients[0].generate("x")) == "RuntimeError: the client is closed"


def test_a_loop_without_a_client_refuses_in_a_child_instead_of_hanging() -> None:
    loop = LoopThread("test-loop")
    assert in_a_child(lambda: loop.call(asyncio.sleep(0))).startswith("RuntimeError: this was begun in the process")
    assert in_a_child(loop.stop) == "None"
    loop.stop()


def test_a_handle_is_pickled_without_the_password_and_goes_on(
    redis_url: str, worker: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = redis_url.partition("://")[2]
    with Client(f"redis://default:hunter2@{place}") as client:
        pickled = pickle.dumps(client.handle("r1", queue="other"))
    assert b"hunter2" not in pickled
    with Client(redis_url) as client:
        pickled = pickle.dumps(client.submit("to be continued"))
    handle: BlockingHandle = pickle.loads(pickled)
    assert handle.result(timeout=WAIT_S).text == "to be continued"
    assert pickle.loads(pickle.dumps(handle)).state() in ("running", "finished")
    assert in_a_child(lambda: pickle.loads(pickled).result(timeout=WAIT_S).text) == "to be continued"
    monkeypatch.setenv("REDIS_URL", f"redis://nobody:hunter2@{place}")
    again: BlockingHandle = pickle.loads(pickle.dumps(handle))
    del handle
    gc.collect()
    assert in_a_child(again.state).startswith("ServerRefused")  # by the environment's user, who does not exist


async def test_an_unpickled_handle_of_asyncio_asks_for_a_client(redis_url: str) -> None:
    async with AsyncClient(redis_url) as client:
        handle: Handle = pickle.loads(pickle.dumps(await client.submit("x")))
        for call in (handle.cancel, handle.state, handle.result):
            with pytest.raises(RuntimeError, match=f"follow it with client.handle\\('{handle.id}', queue='default'\\)"):
                await call()
        assert await client.handle(handle.id, queue=handle.queue).state() == "queued"
