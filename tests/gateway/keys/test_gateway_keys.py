"""API keys decide who may ask the gateway."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import openai
import pytest
from starlette.routing import Route

from penstock.gateway.admission.guard import OPEN_PATHS
from penstock.gateway.app import create_app
from penstock.gateway.keys.secrets import new_secret
from penstock.gateway.settings import GatewaySettings
from penstock.gateway.store import names
from penstock.gateway.store.connection import NAME
from penstock.local.embedded import EmbeddedServer
from penstock.protocol import keys
from penstock.protocol.redis.connection import RedisClient
from tests.support.patience import WAIT_S, eventually
from tests.support.programs.fakes import Behaviour, LossyProxy, ScriptedWorker, one_word, until_cancelled
from tests.support.programs.gateway_client import openai_client
from tests.support.programs.gateway_harness import CARD, Running, announce, new_key, revoke, running_gateway

MESSAGES: Any = [{"role": "user", "content": "hello"}]
BODY = {"model": "tiny", "messages": MESSAGES}


@asynccontextmanager
async def served(
    redis: RedisClient, redis_url: str, behave: Behaviour = one_word, **settings: Any
) -> AsyncIterator[tuple[Running, ScriptedWorker]]:
    await announce(redis)
    async with ScriptedWorker(redis_url, behave) as worker, running_gateway(redis_url, **settings) as gateway:
        yield gateway, worker


async def ask(gateway: Running, key: str, model: str = "tiny", **options: Any) -> str | None:
    async with openai_client(gateway.url, key) as client:
        completion = await client.chat.completions.create(model=model, messages=MESSAGES, **options)
        content: str | None = completion.choices[0].message.content
        return content


async def test_without_keys_everybody_is_answered(redis: RedisClient, redis_url: str) -> None:
    async with served(redis, redis_url) as (gateway, _), httpx2.AsyncClient(base_url=gateway.url) as http:
        assert await ask(gateway, "whatever") == "word"
        assert await ask(gateway, new_secret().text) == "word"
        assert (await http.post("/v1/chat/completions", json=BODY)).status_code == 200


async def test_with_keys_only_their_holders_are(redis: RedisClient, redis_url: str) -> None:
    async with served(redis, redis_url) as (gateway, worker):
        secret = await new_key(redis_url)
        assert await ask(gateway, secret.text) == "word"
        same_id = secret.text[:-43] + new_secret().text[-43:]
        for wrong in ("none", new_secret().text, same_id, secret.text + "x", secret.key_id):
            with pytest.raises(openai.AuthenticationError) as refused:
                await ask(gateway, wrong)
            assert refused.value.code == "invalid_api_key"
            assert len(wrong) < 43 or wrong[-43:] not in str(refused.value)
        assert len(worker.taken) == 1


@pytest.mark.parametrize(
    "header", [{"x-api-key": "{}"}, {"authorization": "bearer  {}"}, {"authorization": "Basic eA==", "x-api-key": "{}"}]
)
async def test_where_a_key_may_be_sent(redis: RedisClient, redis_url: str, header: dict[str, str]) -> None:
    secret = await new_key(redis_url)
    headers = {name: value.format(secret.text) for name, value in header.items()}
    async with served(redis, redis_url) as (gateway, _), httpx2.AsyncClient(base_url=gateway.url) as http:
        assert (await http.post("/v1/chat/completions", json=BODY, headers=headers)).status_code == 200


@pytest.mark.parametrize("headers", [{}, {"authorization": "Basic eA=="}, {"authorization": "Bearer"}])
async def test_without_a_key_the_way_to_send_one_is_told(
    redis: RedisClient, redis_url: str, headers: dict[str, str]
) -> None:
    await new_key(redis_url)
    async with served(redis, redis_url) as (gateway, _), httpx2.AsyncClient(base_url=gateway.url) as http:
        answer = await http.post("/v1/chat/completions", json=BODY, headers=headers)
    assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
    assert "Authorization: Bearer KEY" in answer.json()["error"]["message"]


async def test_every_route_but_health_and_the_page_needs_a_key(redis: RedisClient, redis_url: str) -> None:
    await new_key(redis_url)
    routes = [route for route in create_app(GatewaySettings()).routes if isinstance(route, Route)]
    assert routes
    async with served(redis, redis_url) as (gateway, _), httpx2.AsyncClient(base_url=gateway.url) as http:
        for route in routes:
            path = re.sub(r"{\w+(:\w+)?}", "x", route.path)
            for method in route.methods or ():
                answer = await http.request(method, path)
                assert (answer.status_code == 401) == (path not in OPEN_PATHS), (method, path)
        for path in ("/nowhere", "/v1", "/health/", "/liveness/../v1/models"):
            assert (await http.get(path)).status_code == 401, path
        for host in ("gateway/health?", "gateway/#"):  # with which older Starlettes make up a URL of an open path
            assert (await http.get("/v1/models", headers={"host": host})).status_code == 401, host
        for path in OPEN_PATHS:
            assert (await http.get(path)).status_code != 401, path


async def test_a_revoked_key_and_an_expired_one_are_refused(redis: RedisClient, redis_url: str) -> None:
    """Although no key is left, neither opens the gateway to everybody."""
    async with served(redis, redis_url) as (gateway, worker):
        secret = await new_key(redis_url, expires_in_s=-1)
        with pytest.raises(openai.AuthenticationError, match=f"{secret.key_id} has expired"):
            await ask(gateway, secret.text)
        await redis.delete(names.api_keys())
        secret = await new_key(redis_url)
        await revoke(redis_url, secret)
        with pytest.raises(openai.AuthenticationError, match=f"{secret.key_id} was revoked"):
            await ask(gateway, secret.text)
        with pytest.raises(openai.AuthenticationError):
            await ask(gateway, "none")
        assert worker.taken == []


async def test_a_revocation_is_heard_of_although_the_key_is_known(redis: RedisClient, redis_url: str) -> None:
    async with served(redis, redis_url) as (gateway, _):
        secret = await new_key(redis_url)
        assert await ask(gateway, secret.text) == "word"
        await revoke(redis_url, secret)

        async def is_refused() -> bool:
            try:
                await ask(gateway, secret.text)
            except openai.AuthenticationError:
                return True
            return False

        await eventually(is_refused)


async def test_a_restriction_of_a_later_version_lets_nobody_in(redis: RedisClient, redis_url: str) -> None:
    secret = await new_key(redis_url)
    record = str(await redis.hget(names.api_keys(), secret.key_id))
    await redis.hset(names.api_keys(), secret.key_id, record[:-1] + ',"only_on_mondays":true}')
    async with served(redis, redis_url) as (gateway, _):
        with pytest.raises(openai.AuthenticationError, match="this version can't read only_on_mondays"):
            await ask(gateway, secret.text)


async def test_a_gateway_may_be_told_to_need_keys_that_are_not_there(redis: RedisClient, redis_url: str) -> None:
    async with served(redis, redis_url, require_key=True) as (gateway, _):
        for key in ("none", new_secret().text):
            with pytest.raises(openai.AuthenticationError):
                await ask(gateway, key)


@pytest.mark.parametrize("has_asked", [False, True])
async def test_who_has_seen_keys_goes_on_asking_for_one(redis: RedisClient, redis_url: str, has_asked: bool) -> None:
    secret = await new_key(redis_url)
    async with served(redis, redis_url) as (gateway, _):
        if has_asked:
            assert await ask(gateway, secret.text) == "word"
        with pytest.raises(openai.AuthenticationError):  # so it has looked
            await ask(gateway, new_secret().text)
        await redis.delete(names.api_keys(), names.revocations())
        for key in (new_secret().text, "none"):
            with pytest.raises(openai.AuthenticationError):
                await ask(gateway, key)
        made = await new_key(redis_url)
        assert await ask(gateway, made.text) == "word"


async def test_nobody_is_let_in_unseen_while_redis_is_away(redis_server: EmbeddedServer, redis_url: str) -> None:
    async with LossyProxy(redis_server.port) as proxy, running_gateway(proxy.url) as gateway:
        await proxy.refuse()
        async with httpx2.AsyncClient(base_url=gateway.url, timeout=WAIT_S) as http:
            answer = await http.post("/v1/chat/completions", json=BODY)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")


async def test_a_key_revoked_in_mid_stream_ends_its_streams_alone(redis: RedisClient, redis_url: str) -> None:
    async with served(redis, redis_url, until_cancelled) as (gateway, worker):
        secret, other = await new_key(redis_url), await new_key(redis_url)
        async with (
            openai_client(gateway.url, secret.text) as client,
            openai_client(gateway.url, other.text) as neighbour,
        ):
            stream = await client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
            theirs = await neighbour.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
            await anext(stream)
            await anext(theirs)
            await revoke(redis_url, secret)
            with pytest.raises(openai.APIError, match=f"{secret.key_id} was revoked"):
                await anext(stream)
            await eventually(lambda: redis.exists(keys.cancel("default", str(worker.taken[0].id))))
            assert not await redis.exists(keys.cancel("default", str(worker.taken[1].id)))


async def test_a_key_revoked_while_a_whole_answer_is_waited_for(redis: RedisClient, redis_url: str) -> None:
    async with served(redis, redis_url, until_cancelled) as (gateway, worker):
        secret = await new_key(redis_url)
        asking = asyncio.create_task(ask(gateway, secret.text))
        await eventually(lambda: worker.taken)
        await revoke(redis_url, secret)
        with pytest.raises(openai.AuthenticationError, match="was revoked"):
            await asking


async def test_a_key_that_expires_in_mid_stream_ends_the_stream(redis: RedisClient, redis_url: str) -> None:
    async with served(redis, redis_url, until_cancelled) as (gateway, _):
        secret = await new_key(redis_url, expires_in_s=2)
        async with openai_client(gateway.url, secret.text) as client:
            with pytest.raises(openai.APIError, match=f"{secret.key_id} has expired"):
                async for _ in await client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True):
                    pass


async def test_a_revocation_is_heard_of_over_a_new_connection(redis: RedisClient, redis_url: str) -> None:
    async with served(redis, redis_url, until_cancelled) as (gateway, _):
        secret = await new_key(redis_url)
        async with openai_client(gateway.url, secret.text) as client:
            stream = await client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
            await anext(stream)
            for listed in await redis.client_list():
                if listed["name"] == NAME:
                    await redis.client_kill_filter(_id=listed["id"])
            await revoke(redis_url, secret)
            with pytest.raises(openai.APIError, match="was revoked"):
                await anext(stream)


async def test_a_key_is_for_its_models(redis: RedisClient, redis_url: str) -> None:
    other = CARD.model_copy(update={"model": "other"})
    by_queue = await new_key(redis_url, models=["default"])
    by_model = await new_key(redis_url, models=["other"])
    await announce(redis, "second", other)
    async with served(redis, redis_url) as (gateway, _), ScriptedWorker(redis_url, one_word, queue="second"):
        assert await ask(gateway, by_queue.text, "tiny") == "word"
        assert await ask(gateway, by_queue.text, "default") == "word"
        assert await ask(gateway, by_model.text, "second") == "word"
        for secret, model in ((by_queue, "other"), (by_queue, "second"), (by_model, "tiny"), (by_model, "default")):
            with pytest.raises(openai.NotFoundError, match=f"model '{model}' does not exist"):
                await ask(gateway, secret.text, model)
        with pytest.raises(openai.NotFoundError, match="model 'huge' does not exist"):
            await ask(gateway, by_queue.text, "huge")


async def test_other_models_are_neither_listed_nor_of_any_use(redis: RedisClient, redis_url: str) -> None:
    secret = await new_key(redis_url, models=["default"])
    await announce(redis, "second", CARD.model_copy(update={"model": "other"}))
    body = {"prompt": "x", "input": "x", "tokens": [1], "messages": MESSAGES}
    fields = {
        "/v1/chat/completions": ("messages",), "/v1/completions": ("prompt",), "/v1/responses": ("input",),
        "/v1/count_tokens": ("prompt",), "/tokenize": ("prompt",), "/detokenize": ("tokens",),
    }  # fmt: skip
    async with (
        served(redis, redis_url) as (gateway, worker),
        httpx2.AsyncClient(base_url=gateway.url, headers={"x-api-key": secret.text}) as http,
    ):
        assert [model["id"] for model in (await http.get("/v1/models")).json()["data"]] == ["tiny"]
        assert (await http.get("/v1/models/other")).status_code == 404
        for path, names_of_fields in fields.items():
            for model in ("other", "second"):
                answer = await http.post(path, json={"model": model, **{name: body[name] for name in names_of_fields}})
                assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found"), path
        assert worker.taken == []


async def test_what_a_key_may_not_use_is_told_as_what_nobody_serves(redis: RedisClient, redis_url: str) -> None:
    secret = await new_key(redis_url, models=["default", "tiny"])
    await announce(redis, "tiny", CARD.model_copy(update={"model": "other"}))  # a queue of the name of another's model
    strange = await new_key(redis_url, models=["elsewhere"])
    async with served(redis, redis_url) as (gateway, _):
        assert await ask(gateway, secret.text, "default") == "word"
        await redis.delete(keys.card("default"))  # known, and nobody serves it
        answers = set()
        async with httpx2.AsyncClient(base_url=gateway.url, headers={"x-api-key": strange.text}) as http:
            for model in ("tiny", "other", "default", "never"):
                answer = await http.post("/v1/chat/completions", json={**BODY, "model": model})
                answers.add((answer.status_code, answer.text.replace(model, "MODEL")))
        assert len(answers) == 1, answers


async def test_a_name_is_not_ambiguous_for_who_may_use_one_of_the_queues(redis: RedisClient, redis_url: str) -> None:
    secret, anything = await new_key(redis_url, models=["default"]), await new_key(redis_url)
    await announce(redis, "second")
    async with served(redis, redis_url) as (gateway, _):
        assert await ask(gateway, secret.text, "tiny") == "word"
        with pytest.raises(openai.BadRequestError, match="several queues"):
            await ask(gateway, anything.text, "tiny")


async def test_requests_are_for_the_tenant_of_the_key(redis: RedisClient, redis_url: str) -> None:
    with_tenant, without = await new_key(redis_url, tenant="acme"), await new_key(redis_url)
    async with served(redis, redis_url) as (gateway, worker):
        await ask(gateway, with_tenant.text)
        await ask(gateway, without.text)
        assert [request.tenant for request in worker.taken] == ["acme", None]


@pytest.mark.parametrize("isolates", [False, True])
async def test_prefixes_are_shared_within_a_tenant_where_they_are_isolated(
    redis: RedisClient, redis_url: str, isolates: bool
) -> None:
    """A salt of the client's own divides its tenant's prefixes and leads to no other tenant's."""
    secrets = [await new_key(redis_url, tenant=tenant) for tenant in ("ours", "ours", "theirs", None, None)]
    async with served(redis, redis_url, isolate_prefix_cache=isolates) as (gateway, worker):
        for salt in (None, "mine"):
            for secret in secrets:
                await ask(gateway, secret.text, extra_body={"cache_salt": salt} if salt else {})
        salts = [request.cache_salt for request in worker.taken]
    if isolates:
        assert [salts.index(salt) for salt in salts] == [0, 0, 2, 3, 3, 5, 5, 7, 8, 8]
        assert None not in salts
    else:
        assert salts == [None] * 5 + ["mine"] * 5


async def test_two_keys_have_their_own_idempotency_keys(redis: RedisClient, redis_url: str) -> None:
    async with served(redis, redis_url) as (gateway, worker):
        for secret in (await new_key(redis_url), await new_key(redis_url)):
            async with openai_client(gateway.url, secret.text) as client:
                for _ in range(2):
                    await client.chat.completions.create(
                        model="tiny", messages=MESSAGES, extra_headers={"Idempotency-Key": "one"}
                    )
        assert len(worker.taken) == 2


async def test_nobody_reads_cancels_or_goes_on_from_what_another_key_stored(redis: RedisClient, redis_url: str) -> None:
    owner, other = await new_key(redis_url), await new_key(redis_url)
    async with (
        served(redis, redis_url, until_cancelled) as (gateway, worker),
        openai_client(gateway.url, owner.text) as client,
        openai_client(gateway.url, other.text) as stranger,
    ):
        stored = await client.responses.create(model="tiny", input="x", background=True)
        for attempt in (
            lambda: stranger.responses.retrieve(stored.id),
            lambda: stranger.responses.retrieve(stored.id, stream=True),
            lambda: stranger.responses.input_items.list(stored.id),
            lambda: stranger.responses.cancel(stored.id),
            lambda: stranger.responses.delete(stored.id),
            lambda: stranger.responses.create(model="tiny", input="y", previous_response_id=stored.id),
        ):
            with pytest.raises(openai.NotFoundError):
                await attempt()
        assert (await client.responses.retrieve(stored.id)).status in ("queued", "in_progress")
        await client.responses.cancel(stored.id)

        async def is_cancelled() -> bool:
            return (await client.responses.retrieve(stored.id)).status == "cancelled"

        await eventually(is_cancelled)
        assert len(worker.taken) == 1


async def test_a_revoked_key_s_followers_end_and_its_background_request_goes_on(
    redis: RedisClient, redis_url: str
) -> None:
    async with served(redis, redis_url, until_cancelled) as (gateway, worker):
        secret = await new_key(redis_url)
        async with openai_client(gateway.url, secret.text) as client:
            stored = await client.responses.create(model="tiny", input="x", background=True)
            events = await client.responses.retrieve(stored.id, stream=True)
            await anext(events)
            await revoke(redis_url, secret)
            with pytest.raises(openai.APIError, match="was revoked"):
                async for _ in events:
                    pass
        assert not await redis.exists(keys.cancel("default", str(worker.taken[0].id)))
