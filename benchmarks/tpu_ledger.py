"""Proves what can be proven about TPUs without one: compiles the presets for real topologies and records the figures.

    python -m benchmarks.tpu_ledger [--case 1 ...]

Writes `benchmarks/results/tpu_aot.md` from `benchmarks/results/tpu_aot.jsonl`, which it extends: a case that ran again
replaces its line, so cases can be run one at a time.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from benchmarks.parts.tables import RESULTS
from penstock.engine.config import EngineConfig
from penstock.engine.errors import EngineError
from penstock.installed import how_to_install
from penstock.tools.plan import ALL_OPTIONS, as_dict, has_libtpu, plan, preset
from penstock.tools.plan.device.compiling import WRITING

RESULT = RESULTS / "tpu_aot.md"
CONTEXT = 1024
MAX_RATIO = 1.10


@dataclass(frozen=True, slots=True)
class Case:
    model: str
    topology: str
    tensor: int
    attention: str = "fused"
    kv_cache_dtype: str = "auto"
    decode_steps: int = 1
    expert: int = 1

    @property
    def name(self) -> str:
        parts = [self.model, self.topology, f"tensor {self.tensor}"]
        parts += [f"expert {self.expert}"] if self.expert > 1 else []
        parts += [self.attention]
        parts += [self.kv_cache_dtype] if self.kv_cache_dtype != "auto" else []
        parts += [f"{self.decode_steps} decode steps"] if self.decode_steps > 1 else []
        return ", ".join(parts)


CASES = (
    Case("Qwen3-0.6B", "v5e:2x2", 1),
    Case("Qwen3-0.6B", "v6e:2x2", 1),
    Case("Qwen3-0.6B", "v6e:2x2", 1, decode_steps=4),
    Case("Llama-3.1-8B", "v6e:2x2", 4),
    Case("Llama-3.1-8B", "v6e:2x2", 4, kv_cache_dtype="float8_e4m3fn"),
    Case("Llama-3.1-8B", "v6e:2x2", 4, "ragged"),
    Case("Llama-3.1-8B", "v5e:2x4", 8),
    Case("Llama-3.1-8B", "tpu7x:2x2x1", 1),
    Case("Qwen3-32B", "v6e:2x4", 8),
    Case("Llama-3.3-70B", "v6e:2x4", 8),
    Case("Llama-3.3-70B", "v6e:2x4", 8, kv_cache_dtype="float8_e4m3fn"),
    Case("Llama-3.3-70B", "tpu7x:2x2x1", 8),
    Case("Qwen3.6-27B", "v6e:2x4", 8),
    Case("Qwen3.6-35B-A3B", "v6e:2x2", 2, expert=2),
    Case("Gemma-4-31B", "v6e:2x2", 4),
    Case("Gemma-4-26B-A4B", "v6e:2x2", 1, expert=4),
)
CONFIG: dict[str, int] = {"max_num_seqs": 128, "max_batch_tokens": 512, "max_model_len": 8192}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--case", type=int, nargs="*", help=f"numbers of cases, 1 to {len(CASES)}; none: all")
    if not has_libtpu():
        print(f"libtpu is not installed, so nothing can be compiled for a TPU: {how_to_install('worker,tpu')}")
        return
    for number in arguments.parse_args().case or range(1, len(CASES) + 1):
        case = CASES[number - 1]
        print(f"{number}. {case.name}", file=sys.stderr, flush=True)
        try:
            keep(case, measure(case))
        except EngineError as error:
            keep(case, {"error": str(error)})
    write()


def measure(case: Case) -> dict[str, Any]:
    """Returns the plan's figures; raises its errors if the model does not compile or fit."""
    model = preset(case.model)
    if model is None:
        raise ValueError(f"{case.model} is not a preset")
    config = EngineConfig(  # no compile_cache_dir: compile times are measured
        tensor_parallel=case.tensor,
        expert_parallel=case.expert,
        attention=case.attention,
        kv_cache_dtype=case.kv_cache_dtype,
        decode_steps=case.decode_steps,
        **CONFIG,  # type: ignore[arg-type]
    )
    return as_dict(plan(model, case.topology, config, context=CONTEXT))


def keep(case: Case, figures: dict[str, Any]) -> None:
    kept = load()
    kept[case.name] = figures
    lines = [json.dumps({"case": name, "figures": kept[name]}) for name in (c.name for c in CASES) if name in kept]
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    RESULT.with_suffix(".jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def load() -> dict[str, dict[str, Any]]:
    path = RESULT.with_suffix(".jsonl")
    if not path.exists():
        return {}
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    names = {case.name for case in CASES}
    return {line["case"]: line["figures"] for line in lines if line["case"] in names and _is_of_today(line["figures"])}


def _is_of_today(figures: dict[str, Any]) -> bool:
    """Checks that the figures are from a version that counted every kind of head, and processor time per function."""
    return "error" in figures or all(
        {"full_traffic", "compile_cpu_s"} <= bucket.keys() for bucket in figures["buckets"]
    )


def write() -> None:
    """Writes the page, from all cases that have figures."""
    everything = load()
    kept = {name: figures for name, figures in everything.items() if "error" not in figures}
    failed = {name: figures["error"] for name, figures in everything.items() if "error" in figures}
    parts = [_HEAD.format(**CONFIG, context=CONTEXT), _FITS, *(_fit(name, kept[name]) for name in kept)]
    parts += ["", _BYTES, *(_decode(name, kept[name]) for name in kept), "", _SECONDS]
    parts += [_seconds(name, kept[name]) for name in kept]
    parts += ["", "## What does not compile or fit", ""] if failed else []
    parts += [f"- {name}: {' '.join(error.split())}" for name, error in failed.items()]
    RESULT.write_text("\n".join(parts) + "\n", encoding="utf-8")
    print(f"wrote {RESULT}")


_HEAD = """# TPU ledger

The presets of `penstock plan`, compiled ahead of time by libtpu for the topology named, with abstract weights, on a
machine with no TPU. `make tpu-ledger` writes this page. Nothing was run, so no time on a TPU is claimed.

Settings: bfloat16, max_num_seqs {max_num_seqs}, max_batch_tokens {max_batch_tokens}, max_model_len {max_model_len};
compiled: every function that a worker compiles at its start with these settings. What compiles also fits: running out
of HBM, VMEM or SMEM is a compile error.

`tools/plan/device/hlo.py` counts bytes in the optimised HLO: for each instruction, as often as it runs, the operands
read from HBM and the results written to it. Slices and updates in place count only their own size. The KV that the
attention kernel moves is added: whole pages of {context} tokens per sequence, and what is written for a new token.

The ideal is all weights once, live KV once, the new KV once, and states read and written once. Sampling is greedy. The
kernel that ships in JAX (`ragged`) reads whole blocks, here of 1,024 keys, so at this context it reads a second one for
the new token. On TPU7x the counted program gives nothing to SparseCores: libtpu cannot print the other.
"""
_FITS = """## Does it fit

| model, slice, split, attention | weights GB | pages GB | temporary MB | of GB | tokens | cache in place | per layer |
| --- | --- | --- | --- | --- | --- | --- | --- |"""
_BYTES = """## Bytes of a decode step over the ideal, per device

The last three columns are for a head of 128 rows: the MB that a greedy one moves, and multiples of it. "Filtered" has
temperature and every filter, "all options" all that a request can have.

| model, slice, split, attention | batch 1 | batch 32 | batch 128 | at most 1.10 | head MB | filtered | all options |
| --- | --- | --- | --- | --- | --- | --- | --- |"""
_SECONDS = """## Seconds of compiling

Processor time of all threads, as wall-clock time depends on the machine's load. Functions compile one by one.

| model, slice, split, attention | functions | steps, by tokens | heads, by rows | all options | loops | sum |
| --- | --- | --- | --- | --- | --- | --- |"""


def _fit(name: str, figures: dict[str, Any]) -> str:
    hbm, pages = figures["hbm"], figures["pages"]
    steps = [bucket for bucket in figures["buckets"] if bucket["kind"] in WRITING]
    is_counted = any(bucket["traffic"]["read_bytes"] for bucket in steps)  # if not, libtpu could not print its HLO
    layers = {_counts(bucket["layer_collectives"]) if is_counted else "not counted" for bucket in steps}
    in_place = "yes" if is_counted else "aliased; copies not counted"
    cells = [
        name,
        f"{hbm['weights'] / 1e9:.2f}",
        f"{hbm['pages'] / 1e9:.2f}",
        f"{hbm['temporaries'] / 1e6:.1f}",
        f"{hbm['of'] / 1e9:.2f}",
        f"{pages['tokens_at_once']:,}",
        in_place if pages["aliased_and_never_copied"] else "**no**",
        " or ".join(sorted(layers)),
    ]
    return f"| {' | '.join(cells)} |"


def _decode(name: str, figures: dict[str, Any]) -> str:
    ratios = {step["num_tokens"]: step["bytes_over_ideal"] for step in figures["decode"]}
    cells = [f"{ratios[batch]:.3f}" if batch in ratios else "" for batch in (1, 32, 128)]
    holds = bool(ratios) and all(ratios[batch] <= MAX_RATIO for batch in (1, 32, 128) if batch in ratios)
    verdict = "not counted" if not ratios else "yes" if holds else "**no**"
    return f"| {' | '.join([name, *cells, verdict, *_heads(figures)])} |"


def _heads(figures: dict[str, Any]) -> list[str]:
    def of(kind: str, traffic: str) -> int:
        found = [b[traffic] for b in figures["buckets"] if (b["kind"], b["size"]) == (kind, CONFIG["max_num_seqs"])]
        return sum(counts["read_bytes"] + counts["written_bytes"] for counts in found)

    greedy = of("head", "traffic")
    if not greedy:
        return ["", "", ""]
    others = of("head", "full_traffic"), of(ALL_OPTIONS, "full_traffic")
    return [f"{greedy / 1e6:.0f}", *(f"{other / greedy:.2f}" for other in others)]


def _seconds(name: str, figures: dict[str, Any]) -> str:
    def of(kind: str) -> str:
        return ", ".join(f"{b['size']}: {b['compile_cpu_s']:.0f}" for b in figures["buckets"] if b["kind"] == kind)

    kinds = [of(kind) for kind in ("backbone", "head", ALL_OPTIONS, "loop")]
    total = f"{figures['compile_cpu_s']:.0f}"
    return f"| {' | '.join([name, str(len(figures['buckets'])), *kinds, total])} |"


def _counts(kinds: dict[str, float]) -> str:
    return ", ".join(f"{count:g} {kind}" for kind, count in sorted(kinds.items())) or "none"


if __name__ == "__main__":
    main()
