"""The GPU benchmark runs on a small model and any device, though its figures mean nothing there."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import gpu
from penstock.engine.execution.geometry import Geometry
from penstock.engine.execution.unpacking import unpack_step
from penstock.tools.plan.device.roofline import kv_token_bytes
from penstock.tools.plan.device.weights import step_weight_bytes

pytestmark = pytest.mark.versions


def test_every_kind_of_step_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = tmp_path / "gpu.jsonl"
    steps = "--batches 1 3 --context 20 --prompts 30 --steps 2 --repeats 1"
    options = f"--any-device --model nano {steps} --copy-mib 1 --matmul 64 --results {results}"
    monkeypatch.setattr(sys, "argv", ["gpu", *options.split()])
    gpu.main()
    found = json.loads(results.read_text())
    assert [(row["step"], row["sequences"], row["tokens"]) for row in found["rows"]] == [
        ("decode", 1, 1),
        ("decode", 3, 3),
        ("prefill", 1, 30),
    ]
    assert found["device"]["kind"] == jax.devices()[0].device_kind
    model = gpu.model_of("nano", None)
    decode = found["rows"][1]
    num_bytes = step_weight_bytes(model, 3, None) + 3 * 20 * kv_token_bytes(model, "bfloat16")
    assert decode["rate"] * decode["step_ms"] / 1e3 == pytest.approx(num_bytes, rel=0.5)  # KV is f32 in the XLA form
    assert decode["share"] == pytest.approx(decode["rate"] / found["card"]["copy_bytes_per_s"])


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="there is a GPU")
@pytest.mark.parametrize("part", ["steps", "peers"])
def test_without_a_gpu_it_says_what_to_do(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu", part])
    with pytest.raises(SystemExit, match="this measures a GPU, and jax has a cpu here"):
        gpu.main()


def test_a_packed_step_is_what_the_device_unpacks() -> None:
    geometry = Geometry(4, 16, 40, 8, 100)
    step = gpu.packed(geometry, [(1, 20), (3, 5)])
    inputs = unpack_step(geometry.step_layout(step.num_tokens), jnp.asarray(step.flat))
    assert (step.num_tokens, step.num_rows) == (16, 16)
    np.testing.assert_array_equal(inputs.ragged.cu_q_lens[:4], [0, 1, 4, 4])
    np.testing.assert_array_equal(inputs.ragged.kv_lens[:3], [20, 5, 0])
    np.testing.assert_array_equal(inputs.positions[:4], [19, 2, 3, 4])
    np.testing.assert_array_equal(inputs.ragged.slots[0][:5], [3 * 8 + 3, 6 * 8 + 2, 6 * 8 + 3, 6 * 8 + 4, 0])
    np.testing.assert_array_equal(inputs.sampled.tokens[:2], [0, 3])
