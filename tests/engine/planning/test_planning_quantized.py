"""Plans of quantized models, compiled for real topologies, read codes and scales once, as they are held."""

from __future__ import annotations

import pytest

from penstock.engine.config import EngineConfig
from penstock.engine.formats.detection import read_format
from penstock.engine.loading.packed import expected_packings
from penstock.engine.models import FAMILIES
from penstock.tools.plan import PRESETS
from penstock.tools.plan.device.hlo import HloModule
from penstock.tools.plan.plan import Plan
from tests.engine.planning.plans import plan
from tests.support.needs import needs_libtpu

pytestmark = pytest.mark.versions


STATED = """ENTRY %main (a: u8[8,256,128], x: bf16[16,256]) -> f32[16,256] {
  %a = u8[8,256,128]{2,1,0} parameter(0)
  %x = bf16[16,256]{1,0:S(1)} parameter(1)
  %put = bf16[16,256]{1,0} parameter(2)
  %y.1 = f32[16,256]{1,0:S(1)} custom-call(%a, %x), custom_call_target="tpu_custom_call", metadata={op_name="y"}, backend_config={"cost_estimate":{"bytes_accessed":"57344"}}
  ROOT %y.2 = f32[16,256]{1,0} custom-call(%a, %put), custom_call_target="tpu_custom_call", metadata={op_name="y"}, backend_config={"cost_estimate":{"bytes_accessed":"57344"}}
}
"""  # noqa: E501 -- HLO has long lines


@pytest.mark.parametrize("cache_bytes", [2**30, 2**16])
def test_a_kernel_reads_what_it_states_and_is_not_in_vmem(cache_bytes: int) -> None:
    """The stack of all layers' codes is as large as the cache."""
    traffic = HloModule(STATED).traffic(cache_bytes)
    weight, x, y = 256 * 128, 16 * 256 * 2, 16 * 256 * 4
    assert traffic.read_bytes == weight + (weight + x)
    assert traffic.written_bytes == y
    assert traffic.kernel_bytes == traffic.hbm_bytes


@needs_libtpu
@pytest.mark.parametrize(
    ("weights", "topology", "tensor"),
    [
        ("int4", "v6e:2x2", 4),
        pytest.param("fp8", "v5e:2x4", 8, marks=pytest.mark.slow),
        pytest.param("int4", "v5e:2x4", 8, marks=pytest.mark.slow),
        pytest.param("int8", "v6e:2x2", 4, marks=pytest.mark.slow),
    ],
)
def test_quantized_weights_of_70b_are_read_as_they_are_held(weights: str, topology: str, tensor: int) -> None:
    """The model has three layers and a small vocabulary; its steps have one token and 128."""
    fields = {**PRESETS["Llama-3.3-70B"], "num_hidden_layers": 3, "vocab_size": 2048}
    made = compiled(fields, weights, topology, tensor)
    assert made.temporary_bytes < 2**24
    for step in made.decode:
        logits = 5 * step.num_tokens * 2048 * 4  # as test_planning.py says
        assert step.counted_bytes - logits < 1.10 * step.ideal_bytes


def compiled(fields: dict[str, object], weights: str, topology: str, tensor: int) -> Plan:
    family = FAMILIES["llama"]
    model = expected_packings(None, family, family.config(fields, "bfloat16"), weights)
    config = EngineConfig(tensor_parallel=tensor, max_model_len=2048, max_num_seqs=128, num_pages=257)
    return plan(model, topology, config, only=frozenset({16, 128}))


@needs_libtpu
@pytest.mark.slow
def test_quantized_experts_that_have_rows_are_read_where_they_are() -> None:
    """The hidden size of gpt-oss is not a whole number of tiles, yet nothing of the size of a matrix is copied.

    The plan has all layers: with few, the compiler prefetches the attention's weights of all layers into VMEM, in each
    layer. One token has rows for 4 of 32 experts, 32 tokens for nearly all.
    """
    fields = {**PRESETS["gpt-oss-20b"], "vocab_size": 2048}
    family = FAMILIES["gpt_oss"]
    model = expected_packings(read_format(fields), family, family.config(fields, "bfloat16"), "auto")
    config = EngineConfig(expert_parallel=4, max_model_len=2048, max_num_seqs=32, num_pages=2049)
    made = plan(model, "v6e:2x2", config, only=frozenset({16, 32}))
    for bucket in made.buckets:
        if bucket.kind == "backbone":
            assert bucket.traffic.quantized_grouped_matmuls == 3 * model.num_layers
            assert bucket.traffic.grouped_matmuls == 0
            assert bucket.temporary_bytes < 2880 * 1440  # one expert's
    assert [step.num_tokens for step in made.decode] == [1, 32]
    for step in made.decode:
        logits = 5 * step.num_tokens * 2048 * 4  # as test_planning.py says
        assert step.counted_bytes - logits < 1.10 * step.ideal_bytes
