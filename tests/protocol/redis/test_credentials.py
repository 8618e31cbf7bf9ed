"""User and password change while a process runs: its new connections use the latest."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from redis import exceptions
from redis.asyncio import RedisCluster

from penstock.cli.shared.programs import GATEWAY, PROGRAMS
from penstock.protocol.redis.address import Address, parse_url
from penstock.protocol.redis.connection import RedisClient, connect, renew_connections
from penstock.protocol.redis.credentials import Credentials
from penstock.protocol.redis.faults import is_refused
from penstock.worker.settings import WORKER
from penstock.worker.settings_loading import load


class Login:
    """Credentials of a user whose password changes, and the setting that follows it."""

    def __init__(self, url: str, admin: RedisClient) -> None:
        self._url = url
        self._admin = admin
        self.setting = self.url("first")

    def url(self, password: str) -> str:
        return self._url.replace("//", f"//rotated:{password}@")

    @property
    def address(self) -> Address:
        return parse_url(self.setting).reading(lambda: self.setting)

    async def rotate(self, password: str) -> None:
        """Changes the password, and ends the user's connections, as a removed user's are."""
        everywhere: dict[str, Any] = {"target_nodes": RedisCluster.ALL_NODES}
        options = everywhere if isinstance(self._admin, RedisCluster) else {}
        await self._admin.execute_command("ACL DELUSER", "rotated", **options)
        await self._admin.execute_command("ACL SETUSER", "rotated", "on", f">{password}", "~*", "+@all", **options)


@asynccontextmanager
async def changing(url: str) -> AsyncIterator[Login]:
    async with aclosing(connect(url, decode=True)) as admin:
        login = Login(url, admin)
        await login.rotate("first")
        yield login
        await login.rotate("last")


@pytest.fixture(autouse=True)
def read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.protocol.redis.credentials.READ_EVERY_S", 0.0)


async def test_new_connections_have_the_password_that_is_set_by_then(redis_url: str) -> None:
    await follows(redis_url)


async def test_those_to_all_nodes_of_a_cluster(redis_cluster_url: str) -> None:
    await follows(redis_cluster_url)


async def follows(url: str) -> None:
    async with changing(url) as login, aclosing(connect(login.address, decode=True, retries=1)) as client:
        await client.set("k", "v")
        await login.rotate("second")
        with pytest.raises((exceptions.RedisError, exceptions.RedisClusterException)) as refused:
            await client.get("k")
        assert is_refused(refused.value)
        login.setting = login.url("second")
        assert await client.get("k") == "v"


async def test_connections_can_be_made_anew(redis_url: str, redis: RedisClient) -> None:
    async with aclosing(connect(redis_url, decode=True)) as client:
        before = await client.client_id()
        assert await client.client_id() == before
        renew_connections(client)
        assert await client.client_id() != before


async def test_what_cannot_be_read_leaves_what_was_known() -> None:
    said = ["redis://u:a@h", "no URL", "redis://u:b@h", "redis://:c@h", "redis://h"]
    credentials = Credentials(parse_url(said[0]).reading(lambda: said.pop(0)))
    assert [await credentials.look() for _ in range(3)] == [False, False, True]
    assert await credentials.get_credentials_async() == ("c",)
    assert await credentials.get_credentials_async() == ()


async def test_those_of_sentinels_are_their_own() -> None:
    url = "redis+sentinel://u:p@h/service?sentinel_username=su&sentinel_password=sp"
    address = parse_url(url).reading(lambda: url)
    assert await Credentials(address).get_credentials_async() == ("u", "p")
    assert await Credentials(address, is_sentinel=True).get_credentials_async() == ("su", "sp")


@pytest.mark.parametrize("program", [WORKER, GATEWAY], ids=["worker", "gateway"])
def test_settings_are_read_anew_from_file_and_environment(
    program: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "penstock.toml"
    file.write_text('redis_url = "redis://u:a@h"')
    address = load(program, PROGRAMS, {}, file).address()
    assert address.read_anew is not None
    file.write_text('redis_url = "redis://u:b@h"')
    assert address.read_anew() == "redis://u:b@h"
    monkeypatch.setenv("PENSTOCK_REDIS_URL", "redis://u:c@h")
    assert address.read_anew() == "redis://u:c@h"
    assert "u:" not in repr(address)
