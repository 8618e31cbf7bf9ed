"""The keys of one queue share a slot, and so do those of one request; tenants never share a key."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable

from redis.crc import key_slot

from penstock.protocol import keys

NAMES = {"worker": "NAME", "request_id": "ID", "client_id": "ID", "mailbox": "ID", "tenant": "TENANT",
         "priority": "PRIORITY", "kind": "KIND"}  # fmt: skip
FUNCTIONS: dict[str, Callable[..., str]] = dict(inspect.getmembers(keys, inspect.isfunction))


def made(queue: str, name: str) -> dict[str, str]:
    values = {"queue": queue, "letters": keys.dead(queue)}
    return {
        kind: make(*(values.get(parameter, name) for parameter in inspect.signature(make).parameters))
        for kind, make in FUNCTIONS.items()
    }


def slots(names: list[str]) -> set[int]:
    return {key_slot(name.encode()) for name in names}


def test_a_script_finds_its_keys_in_one_slot() -> None:
    of = made("q", "n")
    of_requests = [of[kind] for kind in ("reply", "state", "cancel")]
    of_queue = [key for kind, key in of.items() if kind not in ("reply", "state", "cancel", "wake", "queues")]
    assert len(slots(of_requests)) == 1
    assert len(slots(of_queue)) == 1
    assert slots(of_requests) != slots(of_queue)


def test_no_two_keys_are_one() -> None:
    named = [
        (kind, queue, name, key)
        for queue, name in itertools.product(("a", "b", "a:b"), ("x", "y"))
        for kind, key in made(queue, name).items()
    ]
    for one, other in itertools.combinations(named, 2):
        parameters = inspect.signature(FUNCTIONS[one[0]]).parameters
        same_queue = one[1] == other[1] or not {"queue", "letters"} & set(parameters)
        same_name = one[2] == other[2] or not NAMES.keys() & set(parameters)
        assert (one[3] == other[3]) == (one[0] == other[0] and same_queue and same_name), (one, other)
