"""Each script, with each type of junk in each of its keys, answers or names the key."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from penstock.protocol import keys, scripts
from penstock.protocol.redis.connection import RedisClient
from penstock.protocol.redis.faults import is_junk, is_no_group
from penstock.protocol.scripts import Bill, Claim, LetterLimits, WorkerCapacity
from penstock.protocol.wire import Envelope
from tests.protocol.scripts.script_calls import owned, run
from tests.support.redis_servers.junk import WRONG_TYPES, harm, is_kept

pytestmark = [pytest.mark.usefixtures("group"), pytest.mark.every_server]

SCRIPTS = {
    name: script
    for name in scripts.__all__
    if inspect.isfunction(script := getattr(scripts, name)) and name != "new_instance" and not name.startswith("parse_")
}
CLAIM = Claim(5, "i", False, False, 0, 0, 1, 0, 0, 0)
GIVEN: dict[str, Any] = {
    "queue": "q", "request_id": "x", "worker": "w", "instance": "i", "ttl_ms": 10**6, "epoch": 5, "handbacks": 1,
    "fields": ("type", "end"), "count": 4, "max_body_bytes": 10**6, "max_bytes": 10**6, "after": "0-0", "lowest": 0,
    "room": 1, "kind": "d/a", "stream": keys.requests("q"), "consumer": "gone", "part": WorkerCapacity(4),
    "every_ms": 1, "target_s": 1.0, "rest_ms": 100, "workers": ("w", "v"), "text": "{}", "listed_ms": 1000,
    "letters": keys.dead("q"),
    "limits": LetterLimits(10, 10**6, 10**6), "claim": CLAIM, "last_number": 0, "status": "done",
    "entries": [(1, ("type", "end"))], "envelope": Envelope(id="c", mailbox="m", timeout_ms=1000), "idle_ms": 1,
    "in_hand": (), "is_serving": True, "must_match": True, "card": {"worker": "w", "digest": "d"},
    "model_ttl_ms": 1000,
}  # fmt: skip
"""Values by parameter name. A parameter without a value here fails."""


MAY_GO = (keys.report("q", ""), keys.cancelled("q"))
"""Keys whose junk may go: reports are overwritten, as no worker may read them; a set of cancels may lose names."""


def command_of(script: Any, entry_id: str) -> Any:
    fields: Any = {"id": "c"} if script is scripts.answer_call else GIVEN["fields"]
    given = {
        **GIVEN,
        "fields": fields,
        "entry_id": entry_id,
        "entry_ids": [entry_id],
        "bills": [Bill(entry_id, "t", 3)],
    }
    wanted = inspect.signature(script).parameters.values()
    return script(**{each.name: given[each.name] for each in wanted if each.default is inspect.Parameter.empty})


def as_text(key: str | bytes) -> str:
    return key if isinstance(key, str) else key.decode()


@pytest.mark.parametrize("name", SCRIPTS)
async def test_junk_in_any_of_its_keys_is_set_aside_or_named(raw: RedisClient, name: str) -> None:
    (entry_id,) = await owned(raw, "w")
    command = command_of(SCRIPTS[name], entry_id)
    for key in dict.fromkeys(map(as_text, command[3 : 3 + command[2]])):
        if key.endswith(":"):  # a beginning of keys
            continue
        for write in WRONG_TYPES.values():
            before = await raw.dump(key)
            junk = await harm(raw, key, write)
            is_none_of_ours = await raw.type(key) in (b"list", b"set") and not key.startswith(MAY_GO)
            try:
                await run(raw, command)
            except Exception as error:
                assert is_junk(error) or is_no_group(error), (key, error)  # noqa: PT017  it may pass as well
            if is_none_of_ours or await raw.keys("*junk:*"):
                assert await is_kept(raw, key, junk), (key, write)
            await raw.delete(key, *await raw.keys("*junk:*"))
            if before is not None:
                await raw.restore(key, 0, before)
