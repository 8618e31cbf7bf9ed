"""When a worker dies after any chunk, text goes on as one text behind the prompt, and calls with a flaw as calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.engine import Engine, EngineConfig
from penstock.engine.scheduling.pace import Pace
from penstock.producer import GenerateRequest
from penstock.protocol.redis.connection import RedisClient
from tests.e2e.spaced_model import CALL_PIECES, NUM_SPECIAL, PIECES, THE, write_spaced_model
from tests.e2e.takeover.left_replies import SIZES, generate, resumed

HALF = NUM_SPECIAL + "é".encode()[0]
BASE: dict[str, Any] = {
    "n": 2, "temperature": 1.5, "max_tokens": 8, "logprobs": 1, "ignore_eos": True,
    "allowed_token_ids": (*PIECES, *(NUM_SPECIAL + byte for byte in "é😀".encode())),
}  # fmt: skip
SAID = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "the a"})
SUN = {"type": "function", "function": {"name": "sun", "parameters": {"properties": {"at": {"type": "string"}}}}}
FLAWED = {"messages": SAID[:1], "tools": (SUN,), "allowed_token_ids": (PIECES[1], PIECES[5], *CALL_PIECES)}
ASKED: dict[str, dict[str, Any]] = {
    "text": {"prompt": "the", "seed": 1},
    "echo": {"prompt": "the", "echo": True, "seed": 2},
    "stop": {"prompt": "the", "stop": (" the", "b."), "seed": 3},
    "character": {"prompt_token_ids": (THE, HALF), "echo": True, "seed": 4},
    "special": {"prompt_token_ids": (1,), "skip_special_tokens": False, "seed": 5},
    "continued": {"messages": SAID, "continue_final_message": True, "echo": True, "seed": 6},
    "turn": {"messages": SAID[:1], "seed": 7},
    "flawed": {**FLAWED, "seed": 6},
    "flawed-stopped": {**FLAWED, "seed": 12, "stop": (" a",)},
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_spaced_model(tmp_path / "model")


def request(kind: str, cut: int) -> GenerateRequest:
    return GenerateRequest.model_validate({**BASE, **ASKED[kind], "id": f"{kind}-{cut}"})


async def test_the_text_is_one_behind_the_prompt_wherever_its_worker_died(
    redis_url: str, redis: RedisClient, model: Path, compile_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Pace, "num_drafts", lambda pace, num_rows, num_pairs, chances, host_s: len(chances))
    settings: dict[str, Any] = {**SIZES, "compile_cache_dir": compile_cache, "chat_format": "qwen3_coder"}
    engine = Engine.from_checkpoint(model, EngineConfig(**settings, speculation="off"))
    outputs = {kind: generate(engine, request(kind, 0)) for kind in ASKED}
    num_mended = engine.stats().tool_calls_mended_total
    cuts = [(kind, cut) for kind in ASKED for cut in range(0, len(outputs[kind]) + 1, 3)]
    replies = await resumed(redis, redis_url, model, EngineConfig(**settings), request, outputs, cuts)
    decode = engine.tokenizer.decode
    for kind in ("text", "echo", "continued", "character"):
        prompt = (THE, HALF) if kind == "character" else engine.tokenizer.encode("the")
        before = {"echo": "the", "continued": "the a", "character": "the"}.get(kind, "")
        for choice in replies[kind, 0].choices:
            head = engine.tokenizer.decode_prompt(prompt)
            said = decode((*prompt, *choice.tokens))
            assert choice.text == before + said[len(head) :], kind
    for choice in replies["turn", 0].choices:
        assert choice.text == decode(choice.tokens)
    calls = [call for kind in ASKED for choice in replies[kind, 0].choices for call in choice.tool_calls]
    assert 1 < num_mended <= len(calls)
    assert {call.name for call in calls} == {"sun"}
