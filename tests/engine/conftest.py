"""Engines shared by the tests of this folder, because compiling takes most of the time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import pytest
from jax._src import compiler
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from penstock.engine import Engine
from penstock.engine.execution.compilation import keep_compilations, no_kept_compilations
from tests.engine.engines import SMALL, forget_prefixes, write_model
from tests.support.quick_programs import AS_SHIPPED, compile_elsewhere_as_shipped


@pytest.fixture(scope="session", autouse=True)
def compiled_once(compile_cache: Path) -> None:
    """Compiles programs that are alike, as the sampling of all tiny models is, only in the first test that
    needs one.
    """
    keep_compilations(compile_cache)


@pytest.fixture(autouse=True)
def kept_there_again(compile_cache: Path) -> Iterator[None]:
    """Leads programs back to the run's folder after a test that chose another one, which is set for the process."""
    yield
    if jax.config.values["jax_compilation_cache_dir"] != str(compile_cache):
        keep_compilations(compile_cache)
        reset_cache()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny"))


@contextmanager
def optimised() -> Iterator[None]:
    """Compiles as for users, in this process, whatever the run's conftest.py has set."""
    as_set: Any = compiler.get_compile_options

    def as_shipped(*arguments: Any, backend: Any = None, env_options_overrides: Any = None, **options: Any) -> Any:
        overrides: dict[str, Any] = {} if backend is None or backend.platform != "cpu" else {**AS_SHIPPED}
        overrides |= env_options_overrides or {}
        return as_set(*arguments, backend=backend, env_options_overrides=overrides, **options)

    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    try:
        with mock.patch.object(compiler, "get_compile_options", as_shipped):
            yield
    finally:
        jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture(scope="session")
def shared_engine(tiny_model: Path) -> Engine:
    """A warmed-up engine with programs as they ship; shapes as in SMALL."""
    with optimised():
        engine = Engine.from_checkpoint(tiny_model, SMALL)
        engine.warm_up()
    return engine


@pytest.fixture
def engine(shared_engine: Engine) -> Engine:
    """The shared engine, idle and with nothing cached."""
    for _ in range(10_000):
        if not shared_engine.has_work():
            break
        shared_engine.step()
    assert not shared_engine.has_work(), "an earlier test left work that never ends"
    forget_prefixes(shared_engine)
    return shared_engine


@pytest.fixture
def as_shipped(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compiles programs as for users, in processes that the test starts too."""
    compile_elsewhere_as_shipped(monkeypatch)
    with optimised():
        yield


@pytest.fixture
def as_shipped_elsewhere(as_shipped: None) -> Iterator[None]:
    """Like `as_shipped`, for devices that are absent: their compiler can't read back what it has written."""
    with no_kept_compilations():
        yield
