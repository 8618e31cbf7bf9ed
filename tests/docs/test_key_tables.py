"""The tables of keys have every key that our modules name; users.acl and the pages follow from them."""

from __future__ import annotations

import inspect
import re
from dataclasses import asdict
from fnmatch import fnmatchcase
from types import ModuleType

import pytest

from docs.scripts.pages import ROOT, page
from docs.scripts.users_acl import users_acl
from penstock.gateway.store import key_table as gateway_table
from penstock.gateway.store import names
from penstock.protocol import key_table, keys
from penstock.protocol.consumers import set_aside_for
from penstock.protocol.key_kinds import KeyKind, Role, total_size
from penstock.worker.redis.guarded import GUARD

KINDS = (*key_table.TABLE, *gateway_table.TABLE)
GROUND: dict[str, tuple[Role, ...]] = {
    "client": ("producer", "gateway"),
    "worker": ("worker",),
    "operator": ("operator",),
    "gateway": ("gateway",),
}
SHOWN = {"queue": "QUEUE", "worker": "NAME", "tenant": "TENANT", "priority": "PRIORITY", "kind": "KIND"}
TYPES = {"zset": "sorted set"}


def shown(kind: KeyKind) -> tuple[str, ...]:
    """Returns the keys of a kind as pages write them."""
    return tuple(kind.named(lambda parameter: SHOWN.get(parameter, "ID")))


def type_of(kind: KeyKind) -> str:
    return TYPES.get(kind.type, kind.type)


@pytest.mark.parametrize(("module", "table"), [(keys, key_table.TABLE), (names, gateway_table.TABLE)])
def test_each_key_that_a_module_names_has_one_row(module: ModuleType, table: tuple[KeyKind, ...]) -> None:
    made = [
        make
        for make in vars(module).values()
        if inspect.isfunction(make) and make.__module__ == module.__name__ and not make.__name__.startswith("_")
    ]
    assert sorted(kind.name for kind in table) == sorted(make.__name__ for make in made)
    assert {kind.make for kind in table} == set(made)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind.make.__module__}.{kind.name}")
def test_a_row_agrees_with_itself(kind: KeyKind) -> None:
    """A key lies within its area, and whoever makes it may write it."""
    if kind.area is not None:
        assert all(any(fnmatchcase(key, pattern) for pattern in kind.area.patterns) for key in kind.patterns)
    else:
        assert not kind.wide
    for role in GROUND[kind.owner]:
        assert any("W" in grant.access for grant in kind.needs(role))


def test_slots_are_those_of_the_hash_tags() -> None:
    slots = {kind.name: kind.slot for kind in key_table.TABLE}
    assert {name for name, slot in slots.items() if slot == "none"} == {"queues"}
    assert {name for name, slot in slots.items() if slot == "id"} == {"reply", "state", "cancel", "wake"}
    assert {kind.slot for kind in gateway_table.TABLE} == {"id"}


def test_the_file_of_users_is_written_from_the_tables() -> None:
    assert (ROOT / "deploy/redis/users.acl").read_text() == users_acl(), "python -m docs.scripts.users_acl"


def test_workers_set_aside_what_they_may_rename() -> None:
    """Reports are the exception: they are overwritten, and only operators read them."""
    for kind in key_table.TABLE:
        may = key_table.SETS_ASIDE in tuple(kind.needs("worker"))
        for key in kind.named(lambda _: "x"):
            is_moved = GUARD.place_for(key) is not None and kind.make is not keys.report
            assert may is is_moved, key


def test_the_wire_page_has_each_key_once() -> None:
    section = page("docs/wire.md")
    told = {row[0].codes[0]: tuple(cell.text for cell in row[1:4]) for row in section.table("Keys")}
    internal = {span.target for span in section.spans} - told.keys()
    for kind in key_table.TABLE:
        for key in shown(kind):
            if key in told:
                assert told.pop(key) == (type_of(kind), kind.owner, kind.expiry.replace("`", "") or "never")
            elif kind.area is key_table.LANES:
                assert "penstock:{QUEUE}:lanes:" in internal
            elif kind.area is key_table.LETTER_COUNTS:
                assert f":{key.rpartition(':')[2]}" in internal
            else:
                assert key in internal
    assert told == {}
    assert keys.heartbeat("QUEUE", set_aside_for("DIGEST")) in internal


def test_the_sizing_page_adds_up_the_tables() -> None:
    size = total_size(KINDS)
    text = (ROOT / "docs/redis.md").read_text()
    (said,) = re.findall(r"^Add ([\d,]+ bytes .+?)\.", text, re.DOTALL | re.MULTILINE)
    large = ("queue", "worker", "client", "api_key")
    assert re.findall(r"\b[\d,]+\b", said) == [f"{getattr(size, name):,}" for name in large]
    rest = asdict(size).keys() - {*large, "fleet", "reply"}
    assert all(getattr(size, name) < 700 for name in rest)
    (formula,) = (block.text for block in page("docs/redis.md").blocks if block.text.startswith("memory ="))
    assert [*map(int, re.findall(r"\d+", formula))] == [size.request, size.reply, size.token, size.remembered]
