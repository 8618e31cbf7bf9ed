"""A KV cache of 8-bit floats: half the bytes or less, and answers that stay close to those of the full precision."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from engines import SMALL, drive

from penstock.engine import ConfigError, Engine, EngineConfig, Request, SamplingParams
from penstock.engine.deployment import deploy, with_pages
from penstock.engine.loading.checkpoint import read_model_config

FP8 = "float8_e4m3fn"


def test_log_probabilities_stay_within_a_quarter_of_full_precision(tiny_model: Path) -> None:
    """Over prompts of several chunks, so that keys and values of all ages are read back."""
    request = Request("r", tuple(range(7, 47)), SamplingParams(max_tokens=1, temperature=0.0, logprobs=20))
    found = []
    for dtype in ("auto", FP8):
        engine = Engine.from_checkpoint(tiny_model, replace(SMALL, attention="xla", kv_cache_dtype=dtype))
        found.append({top.token_id: top.logprob for top in drive(engine, [request])["r", 0].logprobs[0].top})
    exact, narrow = found
    shared = exact.keys() & narrow.keys()
    assert len(shared) >= 10
    assert max(abs(exact[token] - narrow[token]) for token in shared) < 0.25
    assert exact != narrow


def test_pages_are_counted_in_the_type_they_are_kept_in(tiny_model: Path) -> None:
    model = read_model_config(tiny_model)
    config = replace(SMALL, attention="xla", num_pages=None, kv_cache_bytes=2**16, max_num_seqs=16)
    wide, narrow = (deploy(replace(config, kv_cache_dtype=dtype), model) for dtype in ("auto", FP8))
    assert wide.page_bytes == 4 * narrow.page_bytes
    assert with_pages(wide, 0).num_pages == 2**16 // wide.page_bytes
    assert with_pages(narrow, 0).num_pages == 2**16 // narrow.page_bytes


@pytest.mark.parametrize(("dtype", "why"), [("int8", "a scale per model"), ("fp8", "auto, float8_e4m3fn, not 'fp8'")])
def test_other_types_are_refused_by_name(dtype: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        EngineConfig(kv_cache_dtype=dtype)
