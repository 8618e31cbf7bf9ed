"""Weights as other programs quantize and store them, written from the formats' descriptions, with their values.

Each scheme takes a weight f32 `[out, in]` and gives the tensors of its Linear by the suffix of the module's name. It
also gives the values that these stand for, computed in f32 before anything was packed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

Quantized = tuple[dict[str, np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Scheme:
    fields: Mapping[str, Any]  # quantization_config
    quantize: Callable[[np.ndarray], Quantized]


def fp8_blocks(weight: np.ndarray, size: int = 128) -> Quantized:
    num_out, num_in = weight.shape
    shape = (-(-num_out // size), -(-num_in // size))
    scales, codes = np.zeros(shape, np.float32), np.zeros(weight.shape, ml_dtypes.float8_e4m3fn)
    for row in range(shape[0]):
        for column in range(shape[1]):
            at = np.s_[row * size : (row + 1) * size, column * size : (column + 1) * size]
            scales[row, column] = np.abs(weight[at]).max() / 448
            codes[at] = (weight[at] / scales[row, column]).astype(codes.dtype)
    spread = np.kron(scales, np.ones((size, size), np.float32))[:num_out, :num_in]
    return {".weight": codes, ".weight_scale_inv": scales}, codes.astype(np.float32) * spread


def fp8_whole(weight: np.ndarray, *, per_channel: bool, dtype: Any = np.float32) -> Quantized:
    largest = np.abs(weight).max(axis=1, keepdims=True) if per_channel else np.abs(weight).max(keepdims=True)
    scales = (largest / 448).astype(dtype)
    codes = (weight / scales.astype(np.float32)).clip(-448, 448).astype(ml_dtypes.float8_e4m3fn)
    stored = scales if per_channel else scales.reshape(1)
    return {".weight": codes, ".weight_scale": stored}, codes.astype(np.float32) * scales.astype(np.float32)


def int_codes(
    weight: np.ndarray, bits: int, groups: np.ndarray, *, symmetric: bool, dtype: Any
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Returns codes in 0 .. 2**bits - 1, scales and zeros by `[out, group]`, and their values; `groups` has one of each
    feature.
    """
    top = 2**bits - 1
    scales = np.zeros((weight.shape[0], int(groups.max()) + 1), dtype)
    zeros = np.full(scales.shape, 2 ** (bits - 1), np.int64)
    codes = np.zeros(weight.shape, np.int64)
    for group in range(scales.shape[1]):
        at = groups == group
        low, high = weight[:, at].min(axis=1), weight[:, at].max(axis=1)
        size = np.maximum(np.abs(low), np.abs(high)) * 2 if symmetric else high - low
        scales[:, group] = (size / top).astype(dtype)
        scale = scales[:, group].astype(np.float32)
        if not symmetric:
            zeros[:, group] = np.round(-low / scale).clip(0, top)
        codes[:, at] = (np.round(weight[:, at] / scale[:, None]) + zeros[:, group, None]).clip(0, top)
    values = (codes - zeros[:, groups]).astype(np.float32) * scales.astype(np.float32)[:, groups]
    return codes, scales, zeros, values


def words(codes: np.ndarray, bits: int) -> np.ndarray:
    """Packs codes into i32 along the last axis, the first code in the lowest bits; the last word may be
    filled in part.
    """
    per_word = 32 // bits
    padded = np.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, -codes.shape[-1] % per_word)])
    parts = padded.reshape(*codes.shape[:-1], -1, per_word)
    packed = sum(parts[..., place] << (bits * place) for place in range(per_word))
    return np.asarray(packed, np.uint64).astype(np.uint32).view(np.int32)


def in_groups(num_in: int, group: int) -> np.ndarray:
    return np.arange(num_in) // (group or num_in)


def pack_quantized(
    weight: np.ndarray, *, bits: int, group: int, symmetric: bool = True, dtype: Any = ml_dtypes.bfloat16
) -> Quantized:
    groups = in_groups(weight.shape[1], group)
    codes, scales, zeros, values = int_codes(weight, bits, groups, symmetric=symmetric, dtype=dtype)
    tensors = {
        ".weight_packed": words(codes, bits),
        ".weight_scale": scales,
        ".weight_shape": np.array(weight.shape, np.int64),
    }
    if not symmetric:
        tensors[".weight_zero_point"] = np.ascontiguousarray(words(zeros.T, bits).T)
    return tensors, values


def int_quantized(weight: np.ndarray, *, symmetric: bool = True, dtype: Any = np.float32) -> Quantized:
    groups = in_groups(weight.shape[1], 0)
    codes, scales, zeros, values = int_codes(weight, 8, groups, symmetric=symmetric, dtype=dtype)
    tensors = {".weight": (codes - 128).astype(np.int8), ".weight_scale": scales}
    if not symmetric:
        tensors[".weight_zero_point"] = (zeros - 128).astype(np.int8)
    return tensors, values


def awq(weight: np.ndarray, *, group: int) -> Quantized:
    groups = in_groups(weight.shape[1], group)
    codes, scales, zeros, values = int_codes(weight, 4, groups, symmetric=False, dtype=np.float16)
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def by_columns(of_rows: np.ndarray) -> np.ndarray:
        eights = of_rows.T.reshape(of_rows.shape[1], -1, 8)[..., order]
        return words(eights.reshape(of_rows.shape[1], -1), 4)

    return {".qweight": by_columns(codes), ".qzeros": by_columns(zeros), ".scales": scales.T.copy()}, values


def gptq(weight: np.ndarray, *, group: int, bits: int = 4, version: int = 1, ordered: bool = False) -> Quantized:
    groups = in_groups(weight.shape[1], group)
    if ordered:
        groups = np.random.default_rng(weight.shape[1]).permutation(groups)
    codes, scales, zeros, values = int_codes(weight, bits, groups, symmetric=False, dtype=np.float16)
    stored_zeros = (zeros - 1) % 2**bits if version == 1 else zeros
    return {
        ".qweight": np.ascontiguousarray(words(codes, bits).T),
        ".qzeros": words(stored_zeros.T, bits),
        ".scales": scales.T.copy(),
        ".g_idx": groups.astype(np.int32),
    }, values


def mxfp4(weight: np.ndarray) -> Quantized:
    """Quantizes a weight, or experts, `[experts, out, in]`."""
    sizes = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
    blocks = weight.reshape(*weight.shape[:-1], -1, 32)
    exponents = np.floor(np.log2(np.abs(blocks).max(axis=-1))) - 2
    scaled = blocks / np.exp2(exponents)[..., None]
    codes = np.abs(np.abs(scaled)[..., None] - sizes).argmin(axis=-1) + 8 * (scaled < 0)
    values = np.where(codes >= 8, -1, 1) * sizes[codes % 8] * np.exp2(exponents)[..., None]
    packed = (codes[..., 0::2] + 16 * codes[..., 1::2]).astype(np.uint8)
    tensors = {"_blocks": packed, "_scales": (exponents + 127).astype(np.uint8)}
    return tensors, values.astype(np.float32).reshape(weight.shape)


def _compressed(form: str, **weights: object) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"symmetric": True, **weights}, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
    }


def _packed(bits: int, group: int, *, symmetric: bool = True) -> Scheme:
    strategy = {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    fields = _compressed("pack-quantized", num_bits=bits, type="int", symmetric=symmetric, **strategy)
    return Scheme(fields, lambda weight: pack_quantized(weight, bits=bits, group=group, symmetric=symmetric))


def _gptq(bits: int, group: int, version: int = 1, *, ordered: bool = False) -> Scheme:
    fields = {"quant_method": "gptq", "bits": bits, "group_size": group or -1, "desc_act": ordered, "sym": False}
    if version == 2:
        fields["checkpoint_format"] = "gptq_v2"
    return Scheme(fields, lambda w: gptq(w, group=group, bits=bits, version=version, ordered=ordered))


SCHEMES: Mapping[str, Scheme] = {
    "fp8 blocks": Scheme(
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}, fp8_blocks
    ),
    "compressed int4 g32": _packed(4, 32),
    "compressed int4 g128 asymmetric": _packed(4, 128, symmetric=False),
    "compressed int4 channel": _packed(4, 0),
    "compressed int8 packed": _packed(8, 0),
    "compressed int8 packed asymmetric": _packed(8, 32, symmetric=False),
    "compressed int8": Scheme(_compressed("int-quantized", num_bits=8, type="int", strategy="channel"), int_quantized),
    "compressed int8 asymmetric": Scheme(
        _compressed("int-quantized", num_bits=8, type="int", strategy="channel", symmetric=False),
        lambda weight: int_quantized(weight, symmetric=False),
    ),
    "compressed fp8 channel": Scheme(
        _compressed("float-quantized", num_bits=8, type="float", strategy="channel"),
        lambda weight: fp8_whole(weight, per_channel=True, dtype=ml_dtypes.bfloat16),
    ),
    "compressed fp8 tensor": Scheme(
        _compressed("naive-quantized", num_bits=8, type="float", strategy="tensor"),
        lambda weight: fp8_whole(weight, per_channel=False),
    ),
    "awq g128": Scheme(
        {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
        lambda weight: awq(weight, group=128),
    ),
    "awq g32": Scheme(
        {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
        lambda weight: awq(weight, group=32),
    ),
    "gptq g128": _gptq(4, 128),
    "gptq v2 g32": _gptq(4, 32, 2),
    "gptq in order": _gptq(4, 64, ordered=True),
    "gptq 8 bits": _gptq(8, 32),
    "gptq 8 bits channel": _gptq(8, 0),
}
