"""The description of the API has all routes and all fields, and the page made from it loads nothing from elsewhere."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from starlette.routing import Route

from penstock.gateway.app import create_app
from penstock.gateway.openai.unserved import UNSERVED
from penstock.gateway.openapi.document import IGNORED, REFUSED, openapi
from penstock.gateway.openapi.operations import OPERATIONS
from penstock.gateway.page.routes import PATHS as PAGES
from penstock.gateway.settings import GatewaySettings
from penstock.protocol.redis.connection import RedisClient
from tests.gateway.openai.openai_clients import asking
from tests.gateway.test_unknown_fields import APIS
from tests.support.programs.gateway_harness import new_key

POLICIES = {each.body.__name__: each.policy for each in OPERATIONS.values() if each.body is not None and each.policy}
SCHEMAS = openapi()["components"]["schemas"]


def test_every_route_is_described_and_nothing_else() -> None:
    undescribed = {*PAGES, *UNSERVED, "/docs", "/openapi.json"}
    routes = {
        (method, route.path.replace(":path}", "}"))
        for route in create_app(GatewaySettings()).routes
        if isinstance(route, Route) and route.path not in undescribed
        for method in (route.methods or {"GET"}) - {"HEAD"}
    }
    assert routes == set(OPERATIONS)


@pytest.mark.parametrize("name", POLICIES)
def test_a_body_has_the_fields_of_its_policy(name: str) -> None:
    policy, schema = POLICIES[name], SCHEMAS[name]
    assert policy is not None
    assert set(schema["properties"]) == policy.honoured
    assert schema.get(IGNORED, {}) == policy.ignored
    assert set(schema.get(REFUSED, {})) == set(policy.refused)


def _refs(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        yield from [value["$ref"]] if isinstance(value.get("$ref"), str) else []
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _refs(each)


def test_schemas_are_whole() -> None:
    for schema in SCHEMAS.values():
        Draft202012Validator.check_schema(schema)
    assert {ref.rpartition("/")[2] for ref in _refs(openapi())} <= set(SCHEMAS)
    assert '"title": "' not in json.dumps(SCHEMAS)


@pytest.mark.parametrize("api", APIS.values(), ids=APIS)
def test_what_is_taken_follows_its_schema(api: Any) -> None:
    schema = openapi()["paths"][api.path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    validator = Draft202012Validator({**schema, "components": openapi()["components"]})
    stops = {} if "stop" not in api.policy.honoured else {"stop": "a"}
    validator.validate({**api.body, "temperature": 0.5, "top_k": -1, "stream": False, **stops})
    assert not validator.is_valid({**api.body, "temperature": "hot"})
    assert not validator.is_valid({})


async def test_both_need_no_key_and_the_page_loads_nothing_from_elsewhere(redis: RedisClient, redis_url: str) -> None:
    await new_key(redis_url)
    async with asking(redis, redis_url) as asked:
        assert (await asked.http.get("/openapi.json")).json() == openapi()
        answer = await asked.http.get("/docs")
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        text = answer.text
        loaded = re.findall(r'(?:src|href)="([^"]*)"', text)
        assert {each for each in loaded if not each.startswith(("#", "data:"))} <= {
            "openapi.json", "page/style.css", "page/docs.css",
        }  # fmt: skip
        assert "<script" not in text
        for name, policy in POLICIES.items():
            assert policy is not None
            for field in (*policy.honoured, *policy.ignored, *policy.refused):
                assert f"<code>{field}</code>" in text, (name, field)
        assert (await asked.http.get("/page/docs.css")).status_code == 200
    async with asking(redis, redis_url, page=False) as asked:
        assert (await asked.http.get("/docs")).status_code != 200
        assert (await asked.http.get("/openapi.json")).status_code == 200
