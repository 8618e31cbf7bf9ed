"""The list of models."""

from __future__ import annotations

import openai
import pytest
from openai.types import Model

from penstock.gateway import directory
from penstock.protocol import keys
from penstock.protocol.redis.connection import RedisClient
from tests.gateway.openai.openai_clients import HELLO, asking
from tests.support.programs.gateway_client import openai_client
from tests.support.programs.gateway_harness import CARD, announce, running_gateway


async def test_a_model_is_listed_by_its_own_name(redis: RedisClient, redis_url: str) -> None:
    async with asking(redis, redis_url) as asked:
        (model,) = (await asked.openai.models.list()).data
        assert (model.id, model.owned_by) == ("tiny", "penstock")
        (document,) = (await asked.http.get("/v1/models")).json()["data"]
        Model.model_validate(document, strict=True)
        assert (document["queue"], document["max_model_len"]) == ("default", CARD.max_model_len)


async def test_names_that_lead_to_several_queues_are_not_listed(redis: RedisClient, redis_url: str) -> None:
    await announce(redis, "other")
    await announce(redis, "third", CARD.model_copy(update={"model": "org/model"}))
    async with asking(redis, redis_url) as asked:
        listed = [model.id for model in (await asked.openai.models.list()).data]
        assert listed == ["default", "other", "org/model"]
        for name in (*listed, "third"):
            assert (await asked.openai.models.retrieve(name)).id == name


async def test_a_model_has_all_names_that_its_workers_give_it(redis: RedisClient, redis_url: str) -> None:
    await announce(redis, "other", CARD.model_copy(update={"model": "small", "aliases": "gpt-4o shared default"}))
    await announce(redis, "third", CARD.model_copy(update={"model": "big", "aliases": "shared"}))
    async with asking(redis, redis_url) as asked:
        listed = {model.id: model for model in (await asked.openai.models.list()).data}
        assert [*listed] == ["tiny", "small", "gpt-4o", "big"]
        for name in ("small", "gpt-4o", "other"):
            assert (await asked.http.get(f"/v1/models/{name}")).json()["queue"] == "other"
        with pytest.raises(openai.BadRequestError, match="served by several queues"):
            await asked.openai.models.retrieve("shared")


async def test_only_the_queues_named_are_served(redis: RedisClient, redis_url: str) -> None:
    await announce(redis, "other")
    async with asking(redis, redis_url, queues=("default", "absent")) as asked:
        assert [model.id for model in (await asked.openai.models.list()).data] == ["tiny"]
        with pytest.raises(openai.NotFoundError, match="'other' does not exist"):
            await asked.openai.models.retrieve("other")
        with pytest.raises(openai.InternalServerError, match="no worker serves model 'absent' now"):
            await asked.openai.models.retrieve("absent")


async def test_a_model_whose_workers_have_gone_is_unavailable(
    redis: RedisClient, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory, "MAX_AGE_S", 0.0)
    async with asking(redis, redis_url) as asked:
        assert await asked.openai.models.retrieve("tiny")
        await redis.delete(keys.card("default"))
        for name in ("tiny", "default"):
            with pytest.raises(openai.InternalServerError) as caught:
                await asked.openai.chat.completions.create(model=name, messages=HELLO)
            assert (caught.value.status_code, caught.value.code) == (503, "no_worker")
            assert caught.value.response.headers["retry-after"] == "1"
        await announce(redis)
        assert await asked.openai.chat.completions.create(model="tiny", messages=HELLO)


async def test_before_a_worker_serves_every_model_is_unavailable(redis_url: str) -> None:
    async with (
        running_gateway(redis_url) as gateway,
        openai_client(gateway.url) as client,
    ):
        assert (await client.models.list()).data == []
        with pytest.raises(openai.InternalServerError, match="no worker serves model 'tiny' now") as caught:
            await client.models.retrieve("tiny")
        assert (caught.value.status_code, caught.value.code) == (503, "no_worker")
