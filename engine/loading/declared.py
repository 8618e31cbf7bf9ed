"""Checks that a checkpoint's weights are quantized where its config.json says so."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from penstock.engine.errors import CheckpointError
from penstock.engine.formats.detection import quant_method, read_format
from penstock.engine.loading.headers import refuse_names
from penstock.engine.loading.packed import PackedWeights, kernels_of
from penstock.engine.models import ModelConfig, layer_shapes

_MARKS = (".qweight", ".weight_packed", ".weight_scale", ".weight_scale_inv", ".weight_scale_2", "_blocks", ".absmax")


def check_declared(fields: Mapping[str, Any], packed: PackedWeights, config: ModelConfig) -> None:
    """Checks that the files agree with config.json.

    Quantized matmuls are found in the files: without this check a checkpoint of floats would pass for a quantized one.

    Args:
        fields: those of config.json; if they do not mention quantization, nothing is checked.
        packed: the weights.
        config: as `packed.of` returns it.

    Raises:
        CheckpointError: no weight is quantized; or a weight is not quantized in one layer but is in others, and
            config.json does not exempt it.
    """
    declared = read_format(fields)
    if declared is None:
        return
    says = f"config.json says quant_method = {quant_method(fields)!r}"
    quantized = {path for block in config.blocks for path, _ in block.packed}
    if not quantized and not config.packed:
        raise CheckpointError(
            f"{says}, and no weight of the checkpoint is stored so; where they are plain floats, take "
            "quantization_config out of config.json"
        )
    floats = set()
    for layer, block in enumerate(config.blocks):
        held = {path for path, _ in block.packed}
        for path, shape in kernels_of(layer_shapes(replace(block, packed=()), config)):
            module = packed.module(("blocks", layer, *path)).format(0)
            is_float = path in quantized - held and not packed.stored.keys().isdisjoint((module, f"{module}.weight"))
            if is_float and declared.expected(module, shape[-2], config.dtype) is not None:
                floats.add(module)
    refuse_names(floats, f"{says}, and weights of some layers are stored otherwise")


def undeclared(fields: Mapping[str, Any], names: Iterable[str]) -> str:
    """Returns the beginning of the message about tensors that do not fit, if the reason is a format that config.json
    does not state.
    """
    if read_format(fields) is not None or not any(name.endswith(_MARKS) for name in names):
        return ""
    return "weights are quantized, and config.json has no quantization_config that says how; "
