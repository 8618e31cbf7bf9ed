"""Reads from HLO which kernel an instruction calls, and at which geometry: by its name and its operands' shapes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.engine.kernels.tpu import GATED_DELTA_RULE, GROUPED_QUANTIZED_MATMUL
from penstock.tools.plan.device.forms import form_of

_OPERANDS = re.compile(r"operand_layout_constraints=\{(.*?\})\}", re.DOTALL)
_SHAPE = re.compile(r"\b([a-z]+\d*[a-z0-9]*)\[([\d,]*)\]")
ATTENTION = "fused_ragged_paged_attention"

_Shapes = Sequence[tuple[str, tuple[int, ...]]]
"""Type and dimensions of each operand."""


@dataclass(frozen=True, slots=True)
class KernelCall:
    name: str  # of the kernel
    kind: str | None = None  # in the table of schedules; None: it has no such kind, or its geometry cannot be read
    geometry: Mapping[str, Any] = field(default_factory=dict)
    point: int | str = 0  # of the table's row, as far as it is known here

    @property
    def key(self) -> str:
        """All of it, as text."""
        return json.dumps([self.name, self.kind, dict(self.geometry), self.point])

    @classmethod
    def of_key(cls, key: str) -> KernelCall:
        return cls(*json.loads(key))


def kernel_call(name: str, attributes: str) -> KernelCall:
    """Returns the call of an instruction that runs a kernel; `name` is the instruction's."""
    kernel = name.rstrip("0123456789.")
    given = _OPERANDS.search(attributes)
    reader = _READERS.get(kernel)
    if given is None or reader is None:
        return KernelCall(kernel)
    shapes = [(kind, tuple(int(dim) for dim in dims.split(",") if dim)) for kind, dims in _SHAPE.findall(given[1])]
    return reader(kernel, shapes)


def _quantized_matmul(name: str, operands: _Shapes) -> KernelCall:
    _, (_, (rows, num_in)), *weights = operands  # the layer comes first, and weights have an axis of layers
    return _matmul(name, "quantized matmul", [(kind, dims[1:]) for kind, dims in weights], num_in, rows)


def _experts(name: str, operands: _Shapes) -> KernelCall:
    _, (_, (tiles,)), _, (_, (rows, num_in)), *weights = operands  # layers and experts are the weights' first axes
    return _matmul(name, "experts", [(kind, dims[2:]) for kind, dims in weights], num_in, rows // tiles)


def _matmul(name: str, kind: str, weights: _Shapes, num_in: int, rows: int) -> KernelCall:
    form = form_of([(kind, (dims[0], dims[1])) for kind, dims in weights], num_in)
    geometry = {"form": form, "out": weights[0][1][1], "in": num_in}
    return KernelCall(name, kind, geometry, rows) if form else KernelCall(name)


def _draw(name: str, operands: _Shapes) -> KernelCall:
    shares, rows, share = operands[0][1]
    return KernelCall(name, "draw", {"rows": rows, "vocab": shares * share})


def _adjust(name: str, operands: _Shapes) -> KernelCall:
    rows, vocab = next(dims for kind, dims in operands if kind == "f32")
    return KernelCall(name, "adjust", {"rows": rows, "vocab": vocab}, "anything")


def _delta_rule(name: str, operands: _Shapes) -> KernelCall:
    q, v = operands[3][1], operands[5][1]  # behind the slots of each token
    geometry = {"key_heads": q[1], "value_heads": v[1], "head_dim": v[2]}
    return KernelCall(name, "delta rule", geometry, q[0])


_READERS: dict[str, Callable[[str, _Shapes], KernelCall]] = {
    "quantized_matmul": _quantized_matmul,
    GROUPED_QUANTIZED_MATMUL: _experts,
    "draw_tokens": _draw,
    "adjust_logits": _adjust,
    GATED_DELTA_RULE: _delta_rule,
}
