"""An answer over HTTP goes on behind its prompt, with a vocabulary whose decoder strips a leading space."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import reduce
from pathlib import Path
from typing import Any

import httpx2
import pytest
import pytest_asyncio

from penstock.gateway.openai.legacy_logprobs import joined
from tests.e2e.spaced_model import SPACE_A, write_spaced_model
from tests.support.patience import WAIT_S
from tests.support.programs.gateway_client import events_of
from tests.support.programs.gateway_model import QUEUE, serving_checkpoint

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = "the the"
BASE: dict[str, Any] = {"model": QUEUE, "max_tokens": 2, "temperature": 0, "logit_bias": {str(SPACE_A): 100}}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def http(tmp_path_factory: pytest.TempPathFactory, compile_cache: Path) -> AsyncIterator[httpx2.AsyncClient]:
    model = write_spaced_model(tmp_path_factory.mktemp("spaced") / "model")
    async with (
        serving_checkpoint(model, compile_cache) as gateway,
        httpx2.AsyncClient(base_url=gateway.url, timeout=WAIT_S) as client,
    ):
        yield client


async def completed(http: httpx2.AsyncClient, **asked: Any) -> Any:
    response = await http.post("/v1/completions", json={**BASE, "prompt": PROMPT, **asked})
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


async def test_the_first_space_is_there(http: httpx2.AsyncClient) -> None:
    assert (await completed(http))["text"] == " a a"
    assert (await completed(http, echo=True))["text"] == "the the a a"
    assert (await completed(http, prompt=""))["text"] == "a a"  # behind no text
    stopped = await completed(http, stop=[" a"])
    assert (stopped["text"], stopped["finish_reason"]) == ("", "stop")


@pytest.mark.parametrize(("continues", "text"), [(True, " a a"), (False, "a a")])
async def test_a_continued_message_goes_on_and_a_turn_begins(
    http: httpx2.AsyncClient, continues: bool, text: str
) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": PROMPT}]
    more = {"continue_final_message": True, "add_generation_prompt": False} if continues else {}
    response = await http.post("/v1/chat/completions", json={**BASE, "messages": messages, **more})
    assert response.json()["choices"][0]["message"]["content"] == text


@pytest.mark.parametrize("prompt", [PROMPT, ""])
@pytest.mark.parametrize("echo", [False, True])
async def test_log_probabilities_agree_with_the_text(http: httpx2.AsyncClient, prompt: str, echo: bool) -> None:
    asked = {**BASE, "prompt": prompt, "echo": echo, "logprobs": 2}
    choice = await completed(http, **asked)
    found = choice["logprobs"]
    assert "".join(found["tokens"]) == choice["text"]
    ends = [*found["text_offset"][1:], len(choice["text"])]
    spans = zip(found["text_offset"], ends, strict=True)
    assert [choice["text"][start:end] for start, end in spans] == found["tokens"]
    for name, value, best in zip(found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True):
        assert best is None or best[name] == value
    assert await streamed_logprobs(http, asked) == found


async def test_tokens_whose_text_a_stop_string_took_keep_their_log_probabilities(http: httpx2.AsyncClient) -> None:
    asked = {**BASE, "prompt": PROMPT, "stop": [" a"], "logprobs": 0}
    whole = await completed(http, **asked)
    assert (whole["text"], len(whole["logprobs"]["tokens"])) == ("", 1)
    assert await streamed_logprobs(http, asked) == whole["logprobs"]


async def streamed_logprobs(http: httpx2.AsyncClient, asked: dict[str, Any]) -> Any:
    body = (await http.post("/v1/completions", json={**asked, "stream": True})).text
    events = [event.document for event in events_of(body) if event.data != "[DONE]"]
    return reduce(joined, [part for event in events for each in event["choices"] if (part := each["logprobs"])])


async def test_special_tokens_are_spelled_by_detokenize(http: httpx2.AsyncClient) -> None:
    tokens = (await http.post("/tokenize", json={"model": QUEUE, "prompt": PROMPT})).json()["tokens"]
    text = (await http.post("/detokenize", json={"model": QUEUE, "tokens": tokens})).json()["prompt"]
    assert text == f"<s> {PROMPT}"
