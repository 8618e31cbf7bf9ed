"""Each Lua script is a file that is loaded, compiles on the servers, and is the one that its name says."""

from __future__ import annotations

import pkgutil
from importlib import import_module
from importlib.resources import files

import pytest

from penstock.protocol import lua
from penstock.protocol.redis.connection import RedisClient

pytestmark = pytest.mark.every_server

PACKAGES = (
    *(f"penstock.protocol.{name}" for name in ("operations", "queue", "scripts")),
    *(f"penstock.gateway.{name}" for name in ("abandonment", "generation", "keys", "store")),
)  # fmt: skip
LOADED = [
    (f"{module.name.removeprefix('penstock.')}.{name}", text)
    for package in (*PACKAGES, "penstock.worker.redis")
    for module in pkgutil.walk_packages(import_module(package).__path__, f"{package}.")
    for name, text in vars(import_module(module.name)).items()
    if name.startswith("_") and not name.startswith("__") and isinstance(text, str) and "redis." in text
]


def scripts_of(package: str) -> dict[str, str]:
    return {each.name: each.read_text() for each in (files(package) / "lua").iterdir() if each.name.endswith(".lua")}


def test_what_several_scripts_share_comes_before_theirs() -> None:
    script = lua.load("penstock.protocol.scripts", "owned", "ack")
    shared, own = (scripts_of("penstock.protocol.scripts")[f"{name}.lua"] for name in ("owned", "ack"))
    assert script.startswith(shared)
    assert script.endswith(own)


def test_a_script_that_is_not_there_is_named() -> None:
    with pytest.raises(FileNotFoundError, match=r"nothing\.lua"):
        lua.load("penstock.protocol.queue", "nothing")


def test_every_file_is_loaded_by_somebody() -> None:
    texts = [text for _, text in LOADED]
    for package in PACKAGES:
        for name, text in scripts_of(package).items():
            assert any(text in loaded for loaded in texts), name


@pytest.mark.parametrize(("name", "script"), LOADED, ids=[name for name, _ in LOADED])
async def test_it_compiles(redis: RedisClient, name: str, script: str) -> None:
    assert len(await redis.script_load(script)) == 40


def test_a_call_is_a_plain_command() -> None:
    assert lua.call("return 1", ("a", "b"), (1, b"x")) == ("EVAL", "return 1", 2, "a", "b", 1, b"x")
    assert lua.call("return 1", (), (), only_reads=True) == ("EVAL_RO", "return 1", 0)
