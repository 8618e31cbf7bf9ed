"""Checkpoints with quantized Linears, each beside one that holds the same values unquantized."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file

from tests.engine.checkpoints import write_checkpoint
from tests.engine.formats.quantized_weights import Scheme, mxfp4

KINDS = {  # of safetensors
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "int8": "I8",
    "uint8": "U8",
    "int32": "I32",
    "int64": "I64",
}
LINEAR = re.compile(
    r"model\.layers\.\d+\.(?:\w+\.([\w.]+_proj(?:_qkvz?|_z)?)|per_layer_input_gate|per_layer_projection)\.weight"
)
EXPERTS = re.compile(r"model\.layers\.\d+\.mlp\.experts\.(gate_up|down)_proj")
MXFP4_EXPERTS = Scheme({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, mxfp4)


def write_quantized(directory: Path, scheme: Scheme, family: str = "llama", **config: Any) -> tuple[Path, Path]:
    """Writes a checkpoint quantized by `scheme`, and one of the values that its weights stand for."""
    plain = write_checkpoint(directory / "plain", family, **config)
    quantized = directory / "quantized"
    shutil.copytree(plain, quantized)
    tensors, values = _quantized(load_file(plain / "model.safetensors"), scheme)
    save(quantized / "model.safetensors", tensors)
    save(plain / "model.safetensors", values)
    fields = json.loads((quantized / "config.json").read_text())
    (quantized / "config.json").write_text(json.dumps({**fields, "quantization_config": dict(scheme.fields)}))
    return quantized, plain


def _quantized(stored: Mapping[str, np.ndarray], scheme: Scheme) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    tensors: dict[str, np.ndarray] = {}
    values: dict[str, np.ndarray] = {}
    for name, array in stored.items():
        if scheme is not MXFP4_EXPERTS and LINEAR.fullmatch(name):
            parts, values[name] = scheme.quantize(array)
            tensors |= {name.removesuffix(".weight") + part: tensor for part, tensor in parts.items()}
        elif scheme is MXFP4_EXPERTS and EXPERTS.fullmatch(name):  # stored [experts, in, out]
            parts, of_experts = scheme.quantize(array.swapaxes(1, 2))
            values[name] = np.ascontiguousarray(of_experts.swapaxes(1, 2))
            tensors |= {name + part: tensor for part, tensor in parts.items()}
        else:
            tensors[name] = values[name] = array
    return tensors, values


def save(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Saves tensors, also those of types that numpy does not have."""
    header, end = {}, 0
    for name, array in tensors.items():
        header[name] = {
            "dtype": KINDS[array.dtype.name],
            "shape": array.shape,
            "data_offsets": (end, end + array.nbytes),
        }
        end += array.nbytes
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for array in tensors.values():
            file.write(np.ascontiguousarray(array).tobytes())


def tensors_of(path: Path) -> dict[str, np.ndarray]:
    """Reads all tensors of a file, 8-bit types included, for tests that spoil some of them."""
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        data = file.read()
    types = {kind: getattr(ml_dtypes, name, name) for name, kind in KINDS.items()}
    return {
        name: np.frombuffer(data[slice(*entry["data_offsets"])], types[entry["dtype"]]).reshape(entry["shape"])
        for name, entry in header.items()
        if name != "__metadata__"
    }
