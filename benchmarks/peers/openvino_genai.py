"""OpenVINO GenAI's continuous batching. The checkpoint is converted once, to a folder beside it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import openvino  # type: ignore[import-not-found]
import openvino_genai as genai  # type: ignore[import-not-found]

from benchmarks.peers.protocol import (
    KV_CACHE_GIB,
    MAX_BATCH_TOKENS,
    MAX_NUM_SEQS,
    Clock,
    Got,
    Run,
    Setup,
    Wanted,
    serve,
)

PRECISIONS = {"float32": "f32", "bfloat16": "bf16"}


def load(setup: Setup) -> Run:
    scheduler = genai.SchedulerConfig()
    scheduler.max_num_batched_tokens = MAX_BATCH_TOKENS
    scheduler.max_num_seqs = MAX_NUM_SEQS
    scheduler.cache_size = KV_CACHE_GIB
    scheduler.dynamic_split_fuse = True
    scheduler.enable_prefix_caching = setup.prefix_caching
    precision = PRECISIONS[setup.dtype]
    options = {
        "INFERENCE_PRECISION_HINT": precision, "KV_CACHE_PRECISION": "u8" if setup.is_int8 else precision,
        "PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": len(os.sched_getaffinity(0)),
    }  # fmt: skip
    model = converted(Path(setup.model), "int8" if setup.is_int8 else "fp32")
    pipeline = genai.ContinuousBatchingPipeline(str(model), scheduler, "CPU", options)
    run(pipeline, [Wanted([5] * 20, 4, 0.0)])
    return lambda wanted: run(pipeline, wanted)


def converted(model: Path, weights: str) -> Path:
    """Converts weights to f32 or int8; `INFERENCE_PRECISION_HINT` sets the computing precision."""
    target = model.with_name(f"{model.name}-openvino-{weights}")
    if not target.is_dir():
        scratch = target.with_name(target.name + ".part")
        shutil.rmtree(scratch, ignore_errors=True)
        command = [
            str(Path(sys.executable).with_name("optimum-cli")), "export", "openvino", "--model", str(model),
            "--task", "text-generation-with-past", "--weight-format", weights, str(scratch),
        ]  # fmt: skip
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
        scratch.rename(target)
    return target


def run(pipeline: Any, wanted: list[Wanted]) -> list[Got]:
    got = [Got() for _ in wanted]
    handles: dict[int, Any] = {}
    clock, num_sent = Clock(), 0
    while num_sent < len(wanted) or handles:
        while num_sent < len(wanted) and wanted[num_sent].time_s <= clock.now_s():
            prompt = openvino.Tensor(np.array([wanted[num_sent].prompt], dtype=np.int64))
            handles[num_sent] = pipeline.add_request(num_sent, prompt, greedy(wanted[num_sent].num_tokens))
            num_sent += 1
        if not handles:
            clock.sleep_until(wanted[num_sent].time_s)
            continue
        pipeline.step()
        now_s = clock.now_s()
        for place, handle in list(handles.items()):
            while handle.can_read():
                for output in handle.read().values():
                    got[place].add(list(output.generated_ids), now_s)
            if len(got[place].tokens) >= wanted[place].num_tokens:
                del handles[place]
    while pipeline.has_non_finished_requests():
        pipeline.step()
    return got


def greedy(num_tokens: int) -> Any:
    config = genai.GenerationConfig()
    config.max_new_tokens = config.min_new_tokens = num_tokens
    config.ignore_eos = True
    config.do_sample = False
    config.apply_chat_template = False
    return config


if __name__ == "__main__":
    serve(genai.__version__.split("-")[0], load)
