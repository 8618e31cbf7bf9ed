"""Pages behind windows are freed while sequences run: the same tokens take far fewer pages."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.engine import Engine, Request, SamplingParams
from tests.engine.checkpoints import reference_greedy
from tests.engine.engines import SMALL, VOCAB_SIZE, drive, preempting, write_model

PARAMS = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)

MIXED = {"num_hidden_layers": 4, "use_sliding_window": True, "max_window_layers": 2}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "one token, all layers": ("mistral", {"sliding_window": 1}),
    "a page, all layers": ("mistral", {"sliding_window": 4}),
    "two of four layers": ("qwen2", {**MIXED, "sliding_window": 9}),
    "every layer but the third": (
        "qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 5,
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        },
    ),
}


@pytest.mark.parametrize("case", MODELS)
def test_tokens_in_large_pools_and_tiny_ones_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    family, config = MODELS[case]
    directory = write_model(tmp_path, family, **config)
    expected = [greedy(directory, prompt) for prompt in PROMPTS]
    large = Engine.from_checkpoint(directory, replace(SMALL, decode_steps=8))
    assert tokens_of(large, "large") == expected
    assert tokens_of(large, "again") == expected
    assert large.stats().cached_tokens_total > 0
    num_pages = 3 + large._pool.needs.most(72, 1)  # the longest sequence just fits, alone
    tiny = Engine.from_checkpoint(directory, replace(SMALL, num_pages=num_pages))
    assert tiny.max_model_len >= 72
    assert tokens_of(tiny, "tiny", preempted=True) == expected
    assert tiny.stats().preemptions_total > 0
    assert tiny._pool.num_available == num_pages - 1


@pytest.mark.parametrize("attention", ["xla", "native"])
def test_a_sequence_longer_than_its_pool_runs_where_all_layers_have_a_window(attention: str, tmp_path: Path) -> None:
    directory = write_model(tmp_path, "mistral", sliding_window=6, max_position_embeddings=256)
    config = replace(SMALL, num_pages=8, max_model_len=200, attention=attention)
    engine = Engine.from_checkpoint(directory, config)
    assert engine.max_model_len == 200  # and seven pages hold 28 tokens
    prompt = PROMPTS[2]
    results = drive(engine, [Request("long", prompt, replace(PARAMS, max_tokens=64))])
    assert results["long", 0].token_ids == greedy(directory, prompt, 64)
    assert engine.stats().preemptions_total == 0


def test_a_window_that_no_sequence_outgrows_takes_no_pages_of_its_own(tmp_path: Path) -> None:
    directory = write_model(tmp_path, "qwen2", **MIXED, sliding_window=96)
    assert Engine.from_checkpoint(directory, SMALL)._pool.needs.windows == (None,)
    longer = replace(SMALL, max_model_len=97)
    assert Engine.from_checkpoint(directory, longer)._pool.needs.windows == (None, 96)


def greedy(directory: Path, prompt: tuple[int, ...], max_tokens: int = 12) -> list[int]:
    """Returns the greedy tokens of transformers. With a window of one token its cache keeps everything instead of
    nothing, so none is used.
    """
    is_one = json.loads((directory / "config.json").read_text())["sliding_window"] == 1
    return reference_greedy(directory, list(prompt), max_tokens, cached=not is_one)


def tokens_of(engine: Engine, name: str, *, preempted: bool = False) -> list[list[int]]:
    """Returns what follows the prompts; if `preempted`, a sequence is preempted every few steps."""
    before_step = preempting(engine, 9 if preempted else sys.maxsize)
    requests = [Request(f"{name}{i}", prompt, PARAMS) for i, prompt in enumerate(PROMPTS)]
    results = drive(engine, requests, before_step=before_step)
    return [results[f"{name}{i}", 0].token_ids for i in range(len(PROMPTS))]


def _prompts() -> list[tuple[int, ...]]:
    """Makes prompts; the last two begin as the one before them, up to a page's edge and into a page."""
    rng = np.random.default_rng(0)
    found = [tuple(map(int, rng.integers(0, VOCAB_SIZE, length))) for length in (4, 23, 60)]
    return [*found, (*found[-1][:48], 3, 1), (*found[-1][:50], 5, 6, 7)]


PROMPTS = _prompts()
