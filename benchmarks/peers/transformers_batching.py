"""The continuous batching of transformers."""

from __future__ import annotations

import threading
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from benchmarks.peers.protocol import MAX_BATCH_TOKENS, MAX_NUM_SEQS, Clock, Got, Run, Setup, Wanted, serve

PAGE_SIZE, NUM_BLOCKS = 32, 700
NO_TOKEN = -1  # an end token that no model has


def load(setup: Setup) -> Run:
    torch.set_grad_enabled(False)
    loaded = AutoModelForCausalLM.from_pretrained(
        setup.model, dtype=getattr(torch, setup.dtype), attn_implementation="paged|sdpa"
    ).eval()
    loaded.to("cuda" if torch.cuda.is_available() else "cpu")
    batching = ContinuousBatchingConfig(
        num_blocks=max(NUM_BLOCKS, 6 * setup.max_model_len // PAGE_SIZE),
        page_size=PAGE_SIZE,
        max_batch_tokens=MAX_BATCH_TOKENS,
        max_requests_per_batch=MAX_NUM_SEQS,
        allow_block_sharing=setup.prefix_caching,
    )
    run(loaded, batching, [Wanted([5] * 20, 4, 0.0)])
    return lambda wanted: run(loaded, batching, wanted)


def run(model: Any, batching: ContinuousBatchingConfig, wanted: list[Wanted]) -> list[Got]:
    longest = max(each.num_tokens for each in wanted)
    generation = GenerationConfig(do_sample=False, max_new_tokens=longest, eos_token_id=NO_TOKEN, pad_token_id=0)
    got = [Got() for _ in wanted]
    with model.continuous_batching_context_manager(
        generation_config=generation, continuous_batching_config=batching
    ) as manager:
        clock = Clock()
        feeder = threading.Thread(target=feed, args=(manager, wanted, clock), daemon=True)
        feeder.start()
        num_unfinished = len(wanted)
        while num_unfinished:
            output = manager.get_result(timeout=60)
            now_s = clock.now_s()
            if output is None or output.error:
                raise RuntimeError(f"no result within a minute: {output and output.error}")
            each = got[int(output.request_id)]
            each.add(output.generated_tokens[len(each.tokens) :], now_s)
            num_unfinished -= output.is_finished()
        feeder.join()
    return got


def feed(manager: Any, wanted: list[Wanted], clock: Clock) -> None:
    for place, each in enumerate(wanted):
        clock.sleep_until(each.time_s)
        manager.add_request(
            each.prompt, request_id=str(place), max_new_tokens=each.num_tokens, streaming=True, eos_token_id=NO_TOKEN
        )


if __name__ == "__main__":
    serve(transformers.__version__, load)
