"""A plan as plain values."""

from __future__ import annotations

import dataclasses
from typing import Any

from penstock.engine.models import layer_groups
from penstock.tools.plan.device.chips import SOURCE
from penstock.tools.plan.device.published import PUBLISHED
from penstock.tools.plan.device.roofline import Step
from penstock.tools.plan.plan import Plan


def as_dict(plan: Plan) -> dict[str, Any]:
    """Returns what `penstock plan --json` prints: sizes in bytes and times in seconds per device, rates per replica."""
    return {
        "topology": plan.topology,
        "tensor_parallel": plan.tensor,
        "expert_parallel": plan.expert,
        "replicas": plan.replicas,
        "attention": plan.attention,
        "chip": {**dataclasses.asdict(plan.chip), "clock_hz": plan.chip.clock_hz, "source": SOURCE},
        "model": dataclasses.asdict(plan.model),
        "max_model_len": plan.max_model_len,
        "decode_steps": plan.decode_steps,
        "hbm": {
            "weights": plan.weight_bytes,
            "vocab_padding": plan.vocab_padding_bytes,
            "lane_padding": plan.lane_padding_bytes,
            "pages": plan.cache_bytes,
            "states": plan.state_bytes,
            "sampling": plan.sampling_bytes,
            "temporaries": plan.temporary_bytes,
            "programs": plan.code_bytes,
            "used": plan.used_bytes,
            "of": plan.chip.hbm_bytes,
            "spare": plan.spare_bytes,
            "spare_pages": plan.spare_pages,
        },
        "pages": _pages(plan),
        "states": {"count": plan.num_states, "size_bytes": plan.slot_bytes, "kept_every_pages": plan.state_interval},
        "compile_s": plan.compile_s,
        "compile_cpu_s": sum(bucket.compile_cpu_s for bucket in plan.buckets),
        "buckets": [dataclasses.asdict(bucket) for bucket in plan.buckets],
        "decode": [_step(step) for step in plan.decode],
        "decode_filtered": [_step(step) for step in plan.decode_filtered],
        "decode_one_asks": [_step(step) for step in plan.decode_one_asks],
        "decode_all_options": [_step(step) for step in plan.decode_all_options],
        "kernels": plan.kernels,
        "hidden_links": plan.hidden_links,
        "published": [dataclasses.asdict(row) for row in PUBLISHED],
        "prefill": {**_step(plan.prefill), "time_to_first_token_s": plan.prefill.seconds},
    }


def _pages(plan: Plan) -> dict[str, Any]:
    return {
        "size_tokens": plan.page_size,
        "size_bytes": plan.page_bytes,
        "dtype": plan.kv_dtype,
        "padding": plan.page_padding,
        "count": plan.num_pages,
        "useful_at_most": plan.max_pages,
        "tokens_at_once": plan.num_tokens,
        "windows": plan.needs.windows,
        "kinds": [
            {
                "count": count,
                "size_bytes": size,
                "kv_heads": kind.num_kv_heads,
                "head_dim": kind.head_dim,
                "layers_in_a_page": kind.size,
                "groups": plan.needs.kinds.count(number),
            }
            for number, (kind, count, size) in enumerate(
                zip(layer_groups(plan.model).page_kinds, plan.pages.counts, plan.kind_bytes, strict=True)
            )
        ],
        "bytes_of_longest_sequence": plan.sequence_bytes(plan.max_model_len),
        "longest_sequences_at_once": plan.num_sequences(plan.max_model_len),
        "aliased_and_never_copied": plan.cache_is_aliased,
    }


def _step(step: Step) -> dict[str, Any]:
    figures = dataclasses.asdict(step)
    parts = figures.pop("time")
    derived = {
        "expected_s": list(step.expected_s),
        "seconds": step.seconds,
        "tokens_per_s": step.tokens_per_s,
        "bytes_over_ideal": step.overhead,
    }
    return {**figures, **parts, **derived}
