"""Measures the C++ kernels for CPU against XLA's own form, in turn: matmuls, matmuls of experts, and a layer's
attention. Matmuls with quantized weights run against bf16, and against the rate at which memory can be read.

    python -m benchmarks.cpu_kernels

Prints tables and appends them to `benchmarks/results/cpu_kernels.jsonl`.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from rich.console import Console

from benchmarks.parts.tables import RESULTS, table_of
from penstock.engine.attention import KVCacheSpec, RaggedBatch, attention_for
from penstock.engine.deployment.deployment import DEFAULT_BUILD_DIR
from penstock.engine.formats.packing import Packing
from penstock.engine.kernels.cpu import NativeLibrary, load_library
from penstock.engine.models import QKV
from penstock.engine.models.cpu.panels import joined
from penstock.engine.models.layers.linear import GroupedLinear, Linear, RowGroups
from penstock.engine.models.layers.quantized import Quantized
from penstock.tools.bench.report import append_result

SHAPES = ((384, 2304), (2304, 384), (1024, 3072), (3072, 1024))  # features in and out, of `tiny` and `qwen06`
GEOMETRIES = {"16 query, 8 KV heads, head_dim 128": (16, 8, 128), "6 query, 2 KV heads, head_dim 64": (6, 2, 64)}
EXPERTS = ((64, 8, 512, 256), (32, 4, 1024, 768))  # experts, experts per token, features in and out
QUANTIZED = {
    "int8": Packing("int8", 0),
    "int4, groups of 32": Packing("int4", 32, scale="float16", offset="minimums"),
    "int4, groups of 128": Packing("int4", 128, scale="float16", offset="zeros"),
    "W8A8": Packing("int8", 0, has_int8_activations=True),
}
QUANTIZED_SHAPES = ((1024, 3072), (3072, 1024), (1024, 4096), (1024, 151936))  # of `qwen06`; the last is its head
STREAMED_BYTES = 2**28  # of weights that are read one after the other: more than caches hold
NUM_SEQS, LENGTH = 64, 256
CONTEXTS = ((64, 256), (1, 4096), (1, 16384), (4, 4096))  # decoding sequences, and tokens of each
PAGES = (("float32", None), ("bfloat16", None), ("bfloat16", "int8"))  # types of the model and of its pages
_READ_BYTES = 2**28
_BUILD_DIR = DEFAULT_BUILD_DIR / "native"


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    console = Console()
    for title, rows in (
        ("matmuls, us", matmuls()),
        ("grouped matmuls, us", grouped_matmuls()),
        ("matmuls with quantized weights", quantized_matmuls()),
        ("attention of one layer, ms", attention()),
        ("decode of one layer in C++", decode()),
    ):
        console.print(table_of(title, rows))
        append_result(RESULTS / "cpu_kernels.jsonl", {"title": title, "rows": rows})


def matmuls() -> list[dict[str, Any]]:
    library = load_library(_BUILD_DIR)
    rows = []
    for dtype in ("float32", "bfloat16"):
        for features_in, features_out in SHAPES:
            layer = Linear.plain(features_in, features_out, bias=False, dtype=jnp.dtype(dtype), rngs=nnx.Rngs(0))
            forms = {"XLA": jax.jit(layer), "C++": jax.jit(joined(library, layer))}
            for num_tokens in (1, 16, 64, 512):
                x = jax.random.normal(jax.random.key(1), (num_tokens, features_in), dtype)
                seconds = {name: fastest_s(partial(form, x)) for name, form in forms.items()}
                rows.append({
                    "dtype": dtype, "weights": f"{features_in} x {features_out}", "tokens": num_tokens,
                    **{name: round(s * 1e6, 1) for name, s in seconds.items()},
                    "C++ GFLOP/s": round(2e-9 * num_tokens * features_in * features_out / seconds["C++"]),
                    "times": round(seconds["XLA"] / seconds["C++"], 2),
                })  # fmt: skip
    return rows


def grouped_matmuls() -> list[dict[str, Any]]:
    """Times a matrix per expert, and one matrix of as many bytes as those that were read."""
    library, rows = load_library(_BUILD_DIR), []
    for dtype in ("float32", "bfloat16"):
        for num_experts, num_chosen, features_in, features_out in EXPERTS:
            layer = GroupedLinear.plain(
                num_experts, features_in, features_out, bias=False, dtype=jnp.dtype(dtype), rngs=nnx.Rngs(0)
            )
            forms = {"XLA": _with_weights(layer), "C++": _with_weights(joined(library, layer))}
            for num_tokens in (1, 16, 64):
                sizes = _group_sizes(num_tokens, num_experts, num_chosen)
                x = jax.random.normal(jax.random.key(1), (num_tokens * num_chosen, features_in), dtype)
                seconds = {
                    name: fastest_s(partial(form, x, RowGroups(sizes)), repeats=4) for name, form in forms.items()
                }
                num_read = int((sizes > 0).sum())
                dense_s = _dense_s(x[:num_tokens], features_out * num_read, library)
                rows.append({
                    "dtype": dtype, "weights": f"{num_experts} x {features_in} x {features_out}", "tokens": num_tokens,
                    "rows": x.shape[0], "experts read": num_read,
                    **{name: round(s * 1e6, 1) for name, s in seconds.items()},
                    "C++, one matrix": round(dense_s * 1e6, 1),
                    "times": round(seconds["XLA"] / seconds["C++"], 2),
                    "of one matrix": round(dense_s / seconds["C++"], 2),
                })  # fmt: skip
    return rows


def quantized_matmuls() -> list[dict[str, Any]]:
    """Times each form in turn. `of memory` is the weights' bytes per second over the read rate, for a single row."""
    rows = []
    for features_in, features_out in QUANTIZED_SHAPES:
        forms = streams(features_in, features_out)
        for num_tokens in (1, 4, 16, 64, 512):
            if num_tokens * features_out > 64 * 151936:
                continue
            x = jax.random.normal(jax.random.key(1), (num_tokens, features_in), "bfloat16")
            seconds, read_rate = in_turn({name: partial(form, x) for name, (form, _, _) in forms.items()})
            row: dict[str, Any] = {"weights": f"{features_in} x {features_out}", "tokens": num_tokens}
            for name, (_, num_layers, num_bytes) in forms.items():
                each_s = seconds[name] / num_layers
                row[f"{name}, us"] = round(each_s * 1e6, 1)
                if name != "bf16":
                    row[f"{name}, times"] = round(seconds["bf16"] / forms["bf16"][1] / each_s, 2)
                if num_tokens == 1:
                    row[f"{name}, of memory"] = round(num_bytes / each_s / read_rate, 2)
            rows.append(row)
    return rows


def streams(features_in: int, features_out: int) -> dict[str, tuple[Callable[..., Any], int, int]]:
    """Returns by form: the function that multiplies by several layers in a row, their number, and the bytes of each."""
    library = load_library(_BUILD_DIR)
    found: dict[str, tuple[Callable[..., Any], int, int]] = {}
    linear = Linear.plain(features_in, features_out, bias=False, dtype=jnp.dtype("bfloat16"), rngs=nnx.Rngs(0))
    for name in ("bf16", *QUANTIZED):
        plain = linear if name == "bf16" else _quantized(features_in, features_out, QUANTIZED[name])
        layer = joined(library, plain)
        graph, state = nnx.split(layer)
        num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        count = max(1, STREAMED_BYTES // num_bytes)
        copies = [state, *(jax.tree.map(jnp.copy, state) for _ in range(count - 1))]
        found[name] = partial(jax.jit(partial(_through, graph)), copies), count, num_bytes
    return found


def _through(graph: nnx.GraphDef[Any], copies: list[Any], x: jax.Array) -> jax.Array:
    for state in copies:
        x += 0 * nnx.merge(graph, state)(x)[:, :1]  # each begins when the previous one has ended
    return x


def _quantized(features_in: int, features_out: int, packing: Packing) -> Linear:
    held, rng = Quantized(packing, (features_out, features_in)), np.random.default_rng(0)
    arrays = held.empty()
    codes, scales = arrays["codes"], arrays["scales"]
    arrays["codes"] = jnp.asarray(rng.integers(0, 127, codes.shape), codes.dtype)
    return Linear(held, arrays | {"scales": jnp.full_like(scales, 0.01)})


def in_turn(forms: dict[str, Callable[[], jax.Array]], repeats: int = 7) -> tuple[dict[str, float], float]:
    """Returns the seconds of each form in its fastest round, and the fastest read rate of those rounds, in bytes/s."""
    seconds: dict[str, list[float]] = {name: [fastest_s(form, 1, 1)] for name, form in forms.items()}
    memory, rates = np.ones(2**28, np.uint8), []
    parts = np.split(memory.view(np.int64), os.cpu_count() or 1)
    with ThreadPoolExecutor(len(parts)) as pool:
        for _ in range(repeats):
            for name, form in forms.items():
                seconds[name].append(fastest_s(form, 1, 2))
            start = time.perf_counter()
            list(pool.map(np.max, parts))
            rates.append(memory.nbytes / (time.perf_counter() - start))
    return {name: min(of) for name, of in seconds.items()}, max(rates)


def _group_sizes(num_tokens: int, num_experts: int, num_chosen: int) -> jax.Array:
    """Draws group sizes of tokens that choose at random."""
    rng = np.random.default_rng(0)
    chosen = [rng.choice(num_experts, num_chosen, replace=False) for _ in range(num_tokens)]
    return jnp.asarray(np.bincount(np.concatenate(chosen), minlength=num_experts), jnp.int32)


def _with_weights(layer: nnx.Module) -> Callable[..., jax.Array]:
    """Compiles a layer with its weights as an argument: the compiler would fold constants."""
    graph, state = nnx.split(layer)
    return partial(jax.jit(lambda state, *inputs: nnx.merge(graph, state)(*inputs)), state)


def _dense_s(x: jax.Array, features_out: int, library: ctypes.CDLL) -> float:
    layer = Linear.plain(x.shape[1], features_out, bias=False, dtype=x.dtype, rngs=nnx.Rngs(0))
    return fastest_s(partial(_with_weights(joined(library, layer)), x), repeats=4)


def attention() -> list[dict[str, Any]]:
    """Times a decode step of sequences of one length, and a single prompt of as many tokens."""
    rows = []
    for title, heads in GEOMETRIES.items():
        for dtype in ("float32", "bfloat16"):
            row: dict[str, Any] = {"heads": title, "dtype": dtype}
            for what, num_seqs, num_queries in (("decode", NUM_SEQS, 1), ("prefill", 1, LENGTH)):
                for form in ("xla", "native"):
                    seconds = _attention_s(form, dtype, heads, num_seqs, num_queries)[0]
                    row[f"{what}, {'C++' if form == 'native' else 'XLA'}"] = round(seconds * 1e3, 2)
            rows.append(row)
    return rows


def decode() -> list[dict[str, Any]]:
    """Compares the page bytes that a step reads per second with what all threads together read from one long array."""
    rows = []
    for title, heads in GEOMETRIES.items():
        for num_seqs, length in CONTEXTS:
            for dtype, kv_dtype in PAGES:
                rate = read_rate()
                seconds, num_bytes = _attention_s("native", dtype, heads, num_seqs, 1, length, kv_dtype)
                rows.append({
                    "heads": title, "sequences": num_seqs, "tokens of each": length, "pages": kv_dtype or dtype,
                    "ms": round(seconds * 1e3, 3), "GB/s": round(num_bytes / seconds * 1e-9, 1),
                    "of the read rate": round(num_bytes / seconds / rate, 2),
                })  # fmt: skip
    return rows


def read_rate() -> float:
    """Returns bytes per second of all threads together."""
    num_threads = os.cpu_count() or 1
    parts = np.array_split(np.ones(_READ_BYTES // 4, np.int32), num_threads)
    seconds = []
    with ThreadPoolExecutor(num_threads) as threads:
        for _ in range(5):
            start = time.perf_counter()
            list(threads.map(np.max, parts))
            seconds.append(time.perf_counter() - start)
    return _READ_BYTES / min(seconds)


def _attention_s(
    form: str,
    dtype: str,
    heads: tuple[int, int, int],
    num_seqs: int,
    num_queries: int,
    length: int = LENGTH,
    kv_dtype: str | None = None,
) -> tuple[float, int]:
    """Returns seconds, and bytes of the sequences' keys and values."""
    num_heads, num_kv_heads, head_dim = heads
    page_size, rng = 32, np.random.default_rng(0)
    pages_per_seq = length // page_size
    backend = attention_for(form, "cpu", dtype, NativeLibrary(_BUILD_DIR), kv_dtype=kv_dtype)
    num_pages = num_seqs * pages_per_seq + 1
    spec = KVCacheSpec(1, num_pages, page_size, num_kv_heads, head_dim, backend.cache_dtype(dtype))
    cache = [jax.tree.map(partial(_random, rng), backend.init_cache(spec)[0])]
    num_bytes = sum(array.nbytes for array in cache[0]) * (num_pages - 1) // num_pages
    page_indices = rng.permutation(np.arange(1, num_pages)).reshape(num_seqs, pages_per_seq).astype(np.int32)
    positions = np.arange(length - num_queries, length)
    slots = page_indices[:, positions // page_size] * page_size + positions % page_size
    batch = RaggedBatch(
        slots=jnp.asarray(slots.reshape(-1), jnp.int32),
        kv_lens=jnp.full(num_seqs, length, jnp.int32),
        page_indices=jnp.asarray(page_indices),
        cu_q_lens=jnp.arange(num_seqs + 1, dtype=jnp.int32) * num_queries,
        num_seqs=jnp.asarray([num_seqs], jnp.int32),
    )
    num_tokens = num_seqs * num_queries
    q = jnp.asarray(rng.normal(size=(num_tokens, num_heads, head_dim)), dtype)
    k = jnp.asarray(rng.normal(size=(num_tokens, num_kv_heads, head_dim)), dtype)
    step = jax.jit(lambda cache: backend(QKV(q, k, k), cache, batch), donate_argnums=0)

    def run() -> jax.Array:
        out: jax.Array
        out, cache[0] = step(cache[0])
        return out

    return fastest_s(run), num_bytes


def _random(rng: np.random.Generator, array: jax.Array) -> jax.Array:
    if array.dtype == jnp.int8:
        return jnp.asarray(rng.integers(-127, 128, array.shape, np.int8))
    return jnp.asarray(rng.random(array.shape, np.float32), array.dtype)


def fastest_s(run: Callable[[], jax.Array], repeats: int = 8, calls: int = 5) -> float:
    """Returns the seconds of one call, among several in a row, in the fastest of the repeats."""
    run().block_until_ready()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(calls):
            last = run()
        last.block_until_ready()
        seconds.append((time.perf_counter() - start) / calls)
    return min(seconds)


if __name__ == "__main__":
    main()
