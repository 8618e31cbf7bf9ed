"""Each Lua script is a file that is loaded, compiles on the servers, and is the one that its name says."""

from __future__ import annotations

import pkgutil
import re
from importlib import import_module
from pathlib import Path

import pytest

from penstock.protocol import lua
from penstock.protocol.consumers import set_aside_for
from penstock.protocol.keys import UNOWNED, WAITING
from penstock.protocol.ranks import HIGHEST_PRIORITY, LOWEST_PRIORITY, RANK_SPAN, priority_of
from penstock.protocol.redis.connection import RedisClient
from penstock.protocol.wire.requests import AFFINE_CHARS
from tests.support.packages import PACKAGES, ROOT

pytestmark = pytest.mark.every_server

FILES = {
    str(path.relative_to(ROOT)): path.read_text("utf-8")
    for package in PACKAGES
    for path in sorted((ROOT / package).rglob("lua/**/*.lua"))
}
WITH_SCRIPTS = sorted({"penstock." + name.partition("/lua/")[0].replace("/", ".") for name in FILES})
LOADED = {
    f"{module.removeprefix('penstock.')}.{name}": text
    for package in WITH_SCRIPTS
    for module in (
        package,
        *(f"{package}.{found.name}" for found in pkgutil.iter_modules(import_module(package).__path__)),
    )
    for name, text in vars(import_module(module)).items()
    if name.startswith("_") and not name.startswith("__") and isinstance(text, str) and "redis." in text
}


def make_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parts: dict[str, str]) -> str:
    """Writes a package with these parts; returns its name."""
    package = f"scripts_of_{tmp_path.name}"
    for name, text in parts.items():
        path = tmp_path / package / "lua" / f"{name}.lua"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / package / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    return package


def test_a_script_comes_after_what_it_uses_and_each_part_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = {
        "sums/all": "-- Adds.\n-- Loaded after sums/one.lua, sums/two.lua and shared/clock.lua.\nreturn one() + two()",
        "sums/two": "-- Loaded after sums/one.lua.\nlocal function two() return 2 * one() end",
        "sums/one": "local function one() return 1 end",
    }
    clock = FILES["protocol/scripts/lua/shared/clock.lua"]
    script = lua.load(make_parts(tmp_path, monkeypatch, parts), "sums/all")
    assert script == "\n".join((parts["sums/one"], parts["sums/two"], clock, parts["sums/all"]))


def test_a_part_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileNotFoundError, match=r"nothing\.lua"):
        lua.load("penstock.protocol.queue", "nothing")
    package = make_parts(tmp_path, monkeypatch, {"sum": "-- Loaded after nothing.lua.\nreturn 1"})
    with pytest.raises(FileNotFoundError, match=r"nothing\.lua"):
        lua.load(package, "sum")


def test_every_file_is_loaded_by_somebody() -> None:
    assert len(FILES) > 60
    assert [name for name, text in FILES.items() if not any(text in loaded for loaded in LOADED.values())] == []


@pytest.mark.parametrize("name", LOADED)
async def test_it_compiles(redis: RedisClient, name: str) -> None:
    assert len(await redis.script_load(LOADED[name])) == 40


def test_a_call_is_a_plain_command() -> None:
    assert lua.call("return 1", ("a", "b"), (1, b"x")) == ("EVAL", "return 1", 2, "a", "b", 1, b"x")
    assert lua.call("return 1", (), (), only_reads=True) == ("EVAL_RO", "return 1", 0)


async def test_lanes_are_sorted_by_the_same_numbers_in_python(redis: RedisClient) -> None:
    priorities = (LOWEST_PRIORITY, -1, 0, 7, HIGHEST_PRIORITY)
    script = f"""{FILES["protocol/scripts/lua/shared/ranks.lua"]}
    local told = {{tostring(HIGHEST), tostring(LOWEST), string.format('%.0f', SPAN)}}
    for _, priority in ipairs(ARGV) do told[#told + 1] = rank_of(priority, SPAN - 1) end
    return told"""
    highest, lowest, span, *ranks = await redis.eval(script, 0, *priorities)
    assert (int(highest), int(lowest), int(span)) == (HIGHEST_PRIORITY, LOWEST_PRIORITY, RANK_SPAN)
    assert tuple(priority_of(float(rank)) for rank in ranks) == priorities


def test_scripts_and_python_agree_on_names_and_lengths() -> None:
    scripts = "\n".join(FILES.values())
    assert re.findall(r"^local BEGINNING = (\d+)", scripts, re.MULTILINE) == [str(AFFINE_CHARS)]
    assert re.findall(r"^local WAITING, UNOWNED = '(\w+)', '(\w+)'", scripts, re.MULTILINE) == [(WAITING, UNOWNED)]
    assert re.findall(r"^local ASIDE = UNOWNED \.\. '(.)'", scripts, re.MULTILINE) == [set_aside_for("")[-1]]


def test_the_clock_is_read_in_one_place() -> None:
    """A few scripts need the second alone, as the server says it."""
    readers = {
        name for name, text in FILES.items() if "redis.call('TIME')" in text.replace("redis.call('TIME')[1]", "")
    }
    assert readers == {"protocol/scripts/lua/shared/clock.lua"}
