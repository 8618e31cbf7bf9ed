"""A caller's arguments become a request: each form of a prompt, and each mistake by name."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.producer.request import build_request
from penstock.protocol.errors import RequestRefused
from penstock.protocol.wire import GenerateRequest, Message

CHAT = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    ("prompt", "field", "value"),
    [
        ("text", "prompt", "text"),
        ("", "prompt", ""),
        ([1, 2], "prompt_token_ids", (1, 2)),
        (CHAT, "messages", (Message(role="user", content="Hi"),)),
        ([Message(role="user", content="Hi")], "messages", (Message(role="user", content="Hi"),)),
    ],
)
def test_a_prompt_goes_into_its_field(prompt: Any, field: str, value: object) -> None:
    request = build_request(prompt, {"max_tokens": 3}, fresh_id="fresh")
    assert getattr(request, field) == value
    assert (request.id, request.max_tokens) == ("fresh", 3)


def test_the_caller_s_id_wins() -> None:
    assert build_request("x", {"id": "mine"}, fresh_id="fresh").id == "mine"
    assert build_request(GenerateRequest(prompt="x", id="mine"), {}, fresh_id="fresh").id == "mine"
    assert build_request(GenerateRequest(prompt="x"), {}, fresh_id="fresh").id == "fresh"


@pytest.mark.parametrize(
    ("prompt", "sampling", "named"),
    [
        ("x", {"temprature": 1.0}, "temprature"),
        ("x", {"top_p": 1.5}, "top_p"),
        ([], {}, "messages: is empty"),
        ([{"role": "nobody", "content": "x"}], {}, "nobody"),
        ([1, -2], {}, "prompt_token_ids\\[1\\]"),
        ("\ud800", {}, "prompt"),
    ],
)
def test_a_mistake_is_refused_by_its_name(prompt: Any, sampling: Any, named: str) -> None:
    with pytest.raises(RequestRefused, match=named) as refused:
        build_request(prompt, sampling, fresh_id="fresh")
    assert refused.value.code == "invalid_request"


def test_options_beside_a_whole_request_are_a_mistake() -> None:
    with pytest.raises(TypeError, match="max_tokens, seed"):
        build_request(GenerateRequest(prompt="x"), {"max_tokens": 1, "seed": 2}, fresh_id="fresh")
