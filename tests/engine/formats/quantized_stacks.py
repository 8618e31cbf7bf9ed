"""Random quantized weights of several layers or experts, as arrays that a Packing names."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from penstock.engine.formats.packing import Packing, leaf_shapes


def random_stack(packing: Packing, num_out: int, num_in: int, *leading: int) -> dict[str, np.ndarray]:
    """Makes random arrays by the names of `leaf_shapes`, with widely spread scales and a row of zeros."""
    rng = np.random.default_rng(num_in)
    leaves = {}
    for name, (shape, kind) in leaf_shapes(packing, num_out, num_in).items():
        whole = (*leading, *shape)
        if name == "scales" and packing.scale == "e8m0":
            leaves[name] = rng.integers(100, 150, whole, np.uint8)
        elif name == "codes" and packing.code == "fp8":
            leaves[name] = rng.normal(0, 100, whole).clip(-448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
        elif kind in ("uint8", "int8"):
            limits = (0, 16) if name == "zeros" and packing.code == "int4" else (np.iinfo(kind).min, np.iinfo(kind).max)
            leaves[name] = rng.integers(*limits, whole).astype(kind)
        else:
            values = rng.normal(0, 1, whole) * 2.0 ** rng.integers(-20, 8, whole)  # f16, some of them subnormal
            if shape[0] > 1:
                values[..., -1:, :] = 0
            leaves[name] = values.astype(np.dtype(getattr(ml_dtypes, kind, kind)))
    return leaves
