"""Our TPU kernels at chosen geometries: how each is compiled for a chip, and the tables that it is followed for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from penstock.engine.attention import KVCacheSpec, RaggedBatch, page_size_for
from penstock.engine.attention.fused import FusedAttention
from penstock.engine.execution.sampling.adjust_kernel import adjust_by_kernel
from penstock.engine.execution.sampling.draw_filters import MOST_CANDIDATES
from penstock.engine.execution.sampling.draw_kernel import draw
from penstock.engine.execution.sampling.extended_rows import ADJUSTED, BIASED, ExtendedRows, SeenDrafts
from penstock.engine.execution.sampling.sampling_state import SamplingState
from penstock.engine.execution.sampling_rows import PARAMETERS, SamplingRows
from penstock.engine.formats.packing import leaf_shapes
from penstock.engine.kernels.tpu import (
    GATED_DELTA_RULE,
    DeltaTokens,
    DeltaWeights,
    KernelForm,
    TokenSlots,
    gated_delta_rule,
    grouped_quantized_matmul,
    quantized_matmul,
)
from penstock.engine.kernels.tpu.grouped_matmul import rows_of_a_tile
from penstock.engine.models import QKV, StackedCache
from penstock.tools.plan.device.forms import FORMS
from penstock.tools.plan.device.topology import devices_of
from penstock.tools.plan.schedules import Schedule, ScheduleError, compiled_schedules

SEQUENCES, MAX_TOKENS, TOKENS = 64, 8192, 512  # of a batch; of a sequence; of a chunk of a prompt
_DECODES = 1 | 2 | 4  # flags of `TokenSlots`: a token that is real, begins a chunk, and has a past
_EXPERTS = 4
_FEW, _MANY = 8, 24  # sequences: the difference is what one more costs

Geometry = Mapping[str, Any]
Shape = Callable[..., Any]


@dataclass(frozen=True)
class Kernel:
    """How a kind of kernel is compiled, and its cycles at each point of its table."""

    name: str  # that of its `pallas_call`
    unit: str  # what the cycles are of
    points: str  # what the points are
    compile: Callable[[Geometry, int | str, Shape], jax.stages.Compiled]
    cycles: Callable[[Geometry, int | str, Schedule], float]
    compiles_each_point: bool = False  # otherwise one schedule serves all


def measured(
    kind: str, topology: str, geometry: Geometry, points: Sequence[int | str]
) -> tuple[list[Schedule], list[float]]:
    """Compiles a kernel in a process of its own. Returns its schedules, and its cycles at each point."""
    kernel = KERNELS[kind]
    found = [s for s in compiled_schedules(compile_kernel, kind, topology, geometry, points) if s.name == kernel.name]
    schedules = found if kernel.compiles_each_point else found * len(points)
    return found, [kernel.cycles(geometry, *pair) for pair in zip(points, schedules, strict=True)]


def compile_kernel(
    kind: str, topology: str, geometry: Geometry, points: Sequence[int | str]
) -> list[jax.stages.Compiled]:
    place, kernel = NamedSharding(Mesh(np.array(devices_of(topology)), ("all",)), P()), KERNELS[kind]

    def shape(*dims: int, dtype: Any = "int32") -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, dtype, sharding=place)

    return [kernel.compile(geometry, point, shape) for point in (points if kernel.compiles_each_point else points[:1])]


def _compile(function: Callable[..., Any], *arguments: Any, donated: tuple[int, ...] = ()) -> jax.stages.Compiled:
    """Compiles a function that runs whole on each device."""
    mesh = jax.tree.leaves(arguments)[0].sharding.mesh
    everywhere = jax.shard_map(function, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    compiled: jax.stages.Compiled = jax.jit(everywhere, donate_argnums=donated).lower(*arguments).compile()
    return compiled


def _page_size(of: Geometry) -> int:
    return page_size_for("tpu", max_num_seqs=SEQUENCES, max_model_len=MAX_TOKENS, kv_dtype=of["kv"])


def _compile_attention(tokens: int, of: Geometry, _: int | str, shape: Shape) -> jax.stages.Compiled:
    attention = FusedAttention(kv_dtype=of["kv"], device_kind=_device_kind(shape))
    page = _page_size(of)
    spec = KVCacheSpec(2, SEQUENCES, page, of["kv_heads"], of["head_dim"], of["kv"])
    pages = jax.tree.map(lambda array: shape(*array.shape, dtype=array.dtype), attention.cache_arrays(spec)[0])
    q, k = (shape(tokens, heads, of["head_dim"], dtype="bfloat16") for heads in (of["heads"], of["kv_heads"]))
    batch = RaggedBatch(
        shape(tokens), shape(SEQUENCES), shape(SEQUENCES, MAX_TOKENS // page), shape(SEQUENCES + 1), shape(1)
    )

    def attend(qkv: QKV, cache: StackedCache, batch: RaggedBatch) -> Any:
        return attention(qkv, cache, attention.prepare(batch, page))

    return _compile(attend, QKV(q, k, k), StackedCache(pages, shape()), batch, donated=(1,))


def _attention_tables(of: Geometry, lengths: Sequence[int], num_queries: int) -> dict[int, list[int]]:
    """Returns the kernel's tables for sequences that now have these lengths."""
    num, is_decoding = len(lengths), num_queries == 1
    starts = [min(i, num) * num_queries for i in range(SEQUENCES + 1)]
    num_pages = SEQUENCES * (MAX_TOKENS // _page_size(of))
    order = list(range(SEQUENCES))
    counts = [num, 0] if is_decoding else [0, num]
    lengths = [*lengths, *[0] * (SEQUENCES - num)]
    return {0: lengths, 1: starts, 2: [0] * num_pages, 3: order, 4: order, 5: counts, 6: [0]}


def _decode_cycles(of: Geometry, context: int | str, schedule: Schedule) -> float:
    few, many = (schedule.run(_attention_tables(of, [int(context) + 1] * n, 1)).cycles for n in (_FEW, _MANY))
    if many <= few:
        raise ScheduleError(
            f"{_MANY} sequences take {many} cycles, and {_FEW} of them {few}: the loop was not followed"
        )
    return (many - few) / (_MANY - _FEW)


def _prefill_cycles(of: Geometry, before: int | str, schedule: Schedule) -> float:
    return schedule.run(_attention_tables(of, [int(before) + TOKENS], TOKENS)).cycles


def _form(of: Geometry, shape: Shape) -> KernelForm:
    return KernelForm.of_chip(FORMS[of["form"]], _device_kind(shape))


def _device_kind(shape: Shape) -> str:
    device: Any = shape().sharding.mesh.devices.flat[0]
    return str(device.device_kind)


def _held(of: Geometry, leading: tuple[int, ...], shape: Shape) -> dict[str, jax.ShapeDtypeStruct]:
    return held_shapes(_form(of, shape), of["out"], of["in"], leading, shape().sharding)


def held_shapes(
    form: KernelForm, num_out: int, num_in: int, leading: tuple[int, ...], sharding: jax.sharding.Sharding
) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns shapes of what kernels are given for a weight; `leading` axes are of layers and of experts."""
    shapes = leaf_shapes(form.packing, num_out, num_in).items()
    held = form.shapes({leaf: jax.ShapeDtypeStruct((*leading, *shape), kind) for leaf, (shape, kind) in shapes})
    return {name: jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=sharding) for name, each in held.items()}


def _compile_matmul(of: Geometry, rows: int | str, shape: Shape) -> jax.stages.Compiled:
    multiply = partial(quantized_matmul, _form(of, shape), num_out=of["out"])
    return _compile(multiply, shape(int(rows), of["in"], dtype="bfloat16"), _held(of, (8,), shape), shape())


def _compile_experts(of: Geometry, rows: int | str, shape: Shape) -> jax.stages.Compiled:
    multiply = partial(grouped_quantized_matmul, _form(of, shape), num_out=of["out"])
    x, held = shape(_expert_rows(int(rows)), of["in"], dtype="bfloat16"), _held(of, (2, _EXPERTS), shape)
    return _compile(multiply, x, shape(_EXPERTS), held, shape())


def _expert_rows(size: int) -> int:
    """Returns how many rows are cut into tiles of `size`, one for each expert."""
    return _EXPERTS * size // 2


def _expert_cycles(_: Geometry, rows: int | str, schedule: Schedule) -> float:
    """Returns what one more tile costs, of another expert."""
    num_rows = _expert_rows(int(rows))
    if rows_of_a_tile(num_rows, _EXPERTS) != rows:
        raise ScheduleError(f"no experts have tiles of {rows} rows")
    num_tiles = num_rows // int(rows) + min(_EXPERTS, num_rows)
    few, many = (
        schedule.run({0: [0], 1: (list(range(tiles)) + [tiles - 1] * num_tiles)[:num_tiles], 2: [tiles]}).cycles
        for tiles in (1, _EXPERTS)
    )
    return (many - few) / (_EXPERTS - 1)


def _compile_draw(of: Geometry, _: int | str, shape: Shape) -> jax.stages.Compiled:
    num_rows = of["rows"]
    values = {name: shape(num_rows, dtype=np.dtype(kind).name) for name, kind in PARAMETERS.items()}
    rows = SamplingRows(**values, seed=shape(num_rows, 2, dtype="uint32"), output_index=shape(num_rows))
    logits = shape(1, num_rows, of["vocab"], dtype="float32")
    return _compile(partial(draw, vocab_size=of["vocab"]), logits, rows)


def _draw_cycles(of: Geometry, point: int | str, schedule: Schedule) -> float:
    """Returns the cycles by what rows ask; of one that is flat, the filters' candidates do not fit.

    What the kernel branches on are numbers: of rows that ask, or of candidates.
    """
    del of
    number = {"greedy": 0.0, "filtered": 1.0, "flat": MOST_CANDIDATES + 1.0}[str(point)]
    return schedule.run(from_vectors=int(np.float32(number).view(np.int32))).cycles


def _compile_adjust(of: Geometry, _: int | str, shape: Shape) -> jax.stages.Compiled:
    num, vocab = of["rows"], of["vocab"]
    width = -(-vocab // 4096) * 4096
    number, integer, flag = shape(num, dtype="float32"), shape(num), shape(num, dtype="bool")
    rows = ExtendedRows(integer, flag, flag, number, number, number, integer, integer, integer, flag)
    state = SamplingState(shape(64, width), shape(64, width, dtype="float32"), vocab)
    drafts = SeenDrafts(shape(num), shape(num), shape(num))
    masks = shape(num, width // 32)
    logits = shape(num, vocab, dtype="float32")
    return _compile(adjust_by_kernel, logits, rows, state, shape(num), drafts, masks)


def _adjust_cycles(of: Geometry, _: int | str, schedule: Schedule) -> float:
    """Returns the same for all that rows ask: rows of the state that are not read cost their transfers alone."""
    num = -(-of["rows"] // 8) * 8
    return schedule.run({0: [0] * num, 1: [ADJUSTED | BIASED] * num, 2: [0] * num, 3: [0] * num, 4: [-1] * num}).cycles


def _compile_delta(of: Geometry, _: int | str, shape: Shape) -> jax.stages.Compiled:
    num_tokens, num_slots, num_taps, size = SEQUENCES, SEQUENCES + 1, 4, of["head_dim"]
    keys, values = (of["key_heads"], size), (of["value_heads"], size)
    wide = partial(shape, dtype="float32")
    key, value = (shape(num_tokens, *heads, dtype="bfloat16") for heads in (keys, values))
    tokens = DeltaTokens(key, key, value, value, wide(num_tokens, 2, of["value_heads"]))
    of_heads = map(wide, (of["value_heads"], of["value_heads"], size))
    weights = DeltaWeights(*(wide(num_taps, *heads) for heads in (keys, keys, values)), *of_heads)
    taps = (shape(num_slots, num_taps - 1, *heads, dtype="bfloat16") for heads in (keys, keys, values))
    states = (*taps, wide(num_slots, of["value_heads"], size, size))
    slots = TokenSlots(*(shape(num_tokens) for _ in TokenSlots._fields))
    run = partial(gated_delta_rule, num_writes=SEQUENCES, eps=1e-6)

    def layers(tokens: DeltaTokens, weights: DeltaWeights, slots: TokenSlots, states: Any) -> Any:
        """Two layers in a loop, as a stacked decoder runs them: libtpu takes the states in HBM there alone."""
        return jax.lax.fori_loop(
            0, 2, lambda _, carry: run(tokens._replace(gate=carry[0]), weights, slots, carry[1]), (tokens.gate, states)
        )

    return _compile(layers, tokens, weights, slots, states, donated=(3,))


def _delta_cycles(of: Geometry, point: int | str, schedule: Schedule) -> float:
    """Returns the cycles of a token that decodes: it reads a slot's state and writes it."""
    del of
    slots, flags = list(range(int(point))), [_DECODES] * int(point)
    padding = [0] * (SEQUENCES - int(point))
    return schedule.run({0: slots + padding, 1: slots + padding, 2: flags + padding}).cycles / int(point)


KERNELS = {
    "decode attention": Kernel(
        "fused_ragged_paged_attention",
        "a sequence and layer",
        "tokens of context",
        partial(_compile_attention, SEQUENCES),
        _decode_cycles,
    ),
    "prefill attention": Kernel(
        "fused_ragged_paged_attention",
        f"{TOKENS} tokens and layer",
        "tokens before them",
        partial(_compile_attention, TOKENS),
        _prefill_cycles,
    ),
    "quantized matmul": Kernel(
        "quantized_matmul",
        "a call",
        "rows",
        _compile_matmul,
        lambda _, __, schedule: schedule.run({0: [0]}).cycles,
        compiles_each_point=True,
    ),
    "experts": Kernel(
        "grouped_quantized_matmul",
        "a tile of rows, of one expert",
        "rows of a tile",
        _compile_experts,
        _expert_cycles,
        compiles_each_point=True,
    ),
    "delta rule": Kernel(GATED_DELTA_RULE, "a token and layer", "tokens", _compile_delta, _delta_cycles),
    "draw": Kernel("draw_tokens", "a call", "what the rows ask", _compile_draw, _draw_cycles),
    "adjust": Kernel("adjust_logits", "a call", "what the rows ask", _compile_adjust, _adjust_cycles),
}
