"""Whatever the gateway's own keys hold, its routes answer without a 500 and without quoting Redis."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from structlog.testing import capture_logs

from penstock.gateway.keys.secrets import Secret
from penstock.gateway.store import names
from penstock.protocol.key_kinds import KeyKind
from penstock.protocol.redis.connection import RedisClient
from tests.gateway.batches.batches_harness import Asked, asking, jsonl, line
from tests.support.patience import mostly_slow
from tests.support.programs.gateway_client import CHAT, chat
from tests.support.programs.gateway_harness import new_key
from tests.support.redis_servers.junk import GATEWAY_KINDS, WRONG_TYPES, WRONG_VALUES, harm, is_kept

WORDS = ("WRONGTYPE", "Operation against", "user_script", "Traceback", "redis", "Redis", "127.0.0.1", "penstock:")
JUNK: dict[str, Any] = {
    **{
        f"a {kind}": {each.name: write for each in GATEWAY_KINDS if each.type != kind}
        for kind, write in WRONG_TYPES.items()
    },
    **{
        value: {each.name: WRONG_VALUES[each.type][value] for each in GATEWAY_KINDS if value in WRONG_VALUES[each.type]}
        for values in WRONG_VALUES.values()
        for value in values
    },
}


class Routes:
    """A client of all routes that read kept data, with what it has made there."""

    def __init__(self, asked: Asked, secret: Secret) -> None:
        self._asked = asked
        self._headers = {"authorization": f"Bearer {secret.text}"}
        self.key_id = secret.key_id
        self.file = self.batch = self.response = ""

    async def ask(self, method: str, path: str, **more: Any) -> Any:
        answer = await self._asked.http.request(method, path, headers=self._headers, **more)
        assert answer.status_code not in (500, 501, 502), (method, path, answer.text)
        if answer.status_code >= 400:
            assert not [word for word in WORDS if word in answer.text], (method, path, answer.text)
        return answer

    async def make(self) -> None:
        """Makes what the other methods look at."""
        file = await self.ask(
            "POST", "/v1/files", data={"purpose": "batch"}, files={"file": ("a.jsonl", jsonl([line("one")]))}
        )
        self.file = file.json()["id"]
        body = {"input_file_id": self.file, "endpoint": CHAT, "completion_window": "24h"}
        self.batch = (await self.ask("POST", "/v1/batches", json=body)).json()["id"]
        response = await self.ask("POST", "/v1/responses", json={"model": "default", "input": "two words"})
        self.response = response.json()["id"]

    async def look(self) -> None:
        for path in (
            "/v1/batches", f"/v1/batches/{self.batch}", "/v1/files", f"/v1/files/{self.file}",
            f"/v1/responses/{self.response}", f"/v1/responses/{self.response}/input_items", "/v1/models",
        ):  # fmt: skip
            await self.ask("GET", path)
        await self.ask("POST", f"/v1/batches/{self.batch}/cancel")
        body = {"input_file_id": self.file, "endpoint": CHAT, "completion_window": "24h"}
        await self.ask("POST", "/v1/batches", json=body)
        await self.ask("DELETE", f"/v1/responses/{self.response}")

    async def chat(self) -> int:
        return int((await self.ask("POST", CHAT, json=chat("two words"))).status_code)


@pytest.fixture
async def routes(redis: RedisClient, redis_url: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Routes]:
    monkeypatch.setattr(
        "penstock.gateway.keys.cache.MAX_AGE_S", 0.0
    )  # a key that was harmed is known when it is mended
    secret = await new_key(
        redis_url, limits={"requests_per_minute": 10**6, "tokens_per_minute": 10**9, "max_concurrent": 100}
    )
    async with asking(redis, redis_url) as asked:
        yield Routes(asked, secret)


def places(routes: Routes, kind: KeyKind) -> list[str]:
    """Returns the keys of a kind that these routes read."""
    made = {
        "record": [("batch", routes.batch), ("file", routes.file), ("response", routes.response.removeprefix("resp_"))],
        "owned": [("batch", routes.key_id), ("file", routes.key_id)],
        "body": [(routes.file, "uploaded"), (routes.batch, "output"), (routes.batch, "errors")],
    }
    if kind.name in made:
        return [kind.make(*each) for each in made[kind.name]]
    return [kind.key(key_id=routes.key_id, file_id=routes.file, batch_id=routes.batch, request_id="x", name="probe")]


@pytest.mark.parametrize(
    "writes", mostly_slow(JUNK, "a string", "a list", "a hash", "a zset", "words", "deep", "no text")
)
async def test_whatever_a_key_holds_its_routes_answer(
    routes: Routes, redis_url: str, raw: RedisClient, writes: dict[str, Any]
) -> None:
    await routes.make()
    with capture_logs() as logs:
        for kind in GATEWAY_KINDS:
            if kind.name not in writes:
                continue
            for key in places(routes, kind):
                before = await raw.dump(key)
                junk = await harm(raw, key, writes[kind.name])
                del logs[:]
                await routes.look()
                status = await routes.chat()
                if kind.name not in ("api_keys", "revocations"):
                    assert status == 200, key
                assert all(line["log_level"] != "critical" for line in logs)
                for event in ("junk_set_aside", "junk_passed_over"):
                    named = [line["key"] for line in logs if line["event"] == event]
                    assert len(named) == len(set(named)), named
                assert not [line for line in logs if line["event"] in ("request_failed", "batch_failed")], logs
                if writes[kind.name] in WRONG_TYPES.values():
                    assert await is_kept(raw, key, junk), key
                if kind.name in ("api_keys", "revocations", "record", "body", "batch_progress"):
                    await raw.delete(key)
                    if before is not None:
                        await raw.restore(key, 0, before)
    assert await routes.chat() == 200


def test_all_kinds_of_documents_are_among_them() -> None:
    assert {kind.name for kind in GATEWAY_KINDS} >= {"record", "owned", "body"}
    assert json.loads("{}") == {}
    assert names.record("batch", "b") == "penstock:gateway:{b}:batch"
