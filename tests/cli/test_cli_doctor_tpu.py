from __future__ import annotations

import pytest

from penstock.cli.checks.tpu import check_tpu, lie_of
from penstock.engine.config import EngineConfig
from penstock.engine.deployment.deployment import deploy
from penstock.tools.plan import preset

GIB = 2**30


def test_a_layout_is_told_with_its_numbers_and_what_does_not_fit_fails() -> None:
    model = preset("Llama-3.1-8B", "float32")
    assert model is not None
    config = EngineConfig(max_num_seqs=64, max_model_len=8192, attention="xla")
    deployment = deploy(config, model)  # of the CPU, whose pages are smaller than a TPU's would be
    page_size, memory, attention = lie_of(deployment, config, 32 * GIB)
    assert "32 tokens: the smallest from 64" in page_size.detail
    assert memory.status == "ok"
    assert "weights 29.92 GiB per device" in memory.detail
    assert attention.detail == "xla, 1 devices for one copy of the model"
    assert lie_of(deployment, config, 29 * GIB)[1].status == "fail"


def test_8_bit_pages_hold_four_times_the_tokens_of_full_precision_but_for_their_scales() -> None:
    model = preset("Llama-3.1-8B", "float32")
    assert model is not None
    tokens = []
    for dtype in ("auto", "float8_e4m3fn"):
        config = EngineConfig(max_num_seqs=64, max_model_len=8192, attention="xla", kv_cache_dtype=dtype)
        detail = lie_of(deploy(config, model), config, 32 * GIB)[1].detail
        tokens.append(int(detail.rpartition(": ")[2].split()[0]))
    assert "pages of float8_e4m3fn" in detail
    assert tokens[1] // 32 == pytest.approx(4 * tokens[0] * 128 / (128 + 4) // 32, abs=4)  # head_dim is 128


def test_without_a_tpu_nothing_is_said_of_one() -> None:
    assert check_tpu("demo", EngineConfig()) == []
