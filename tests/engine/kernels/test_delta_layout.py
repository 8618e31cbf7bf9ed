"""Models that run the TPU kernel for delta nets, laid out for real topologies; nothing is compiled."""

from __future__ import annotations

import pytest
from flax import nnx

from penstock.engine.loading.checkpoint import abstract_model
from penstock.engine.models.layers.delta_net import DeltaNet
from penstock.engine.sharding.linears import prepare_for_tpu
from penstock.engine.sharding.placement import place, split_model
from penstock.engine.sharding.states import KernelDeltaNet
from penstock.tools.plan import preset
from penstock.tools.plan.device.topology import devices_of
from tests.support.needs import needs_libtpu

pytestmark = needs_libtpu


@pytest.mark.parametrize(("num_layers", "has_kernel"), [(8, True), (4, True), (5, False)])
def test_delta_nets_of_layers_that_repeat_have_the_kernel(num_layers: int, has_kernel: bool) -> None:
    model = preset("Qwen3.6-27B")
    assert model is not None
    placement = place(devices_of("v6e:2x4"), 8)
    abstract = abstract_model(split_model(model.first_layers(num_layers), 8), placement, stacked=True)
    prepared = prepare_for_tpu(abstract, placement)
    nets = [module for _, module in nnx.iter_modules(prepared) if isinstance(module, DeltaNet)]
    assert nets
    assert {isinstance(net, KernelDeltaNet) for net in nets} == {has_kernel}
