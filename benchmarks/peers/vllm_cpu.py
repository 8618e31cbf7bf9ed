"""vLLM on CPU, stepped in this process."""

from __future__ import annotations

from typing import Any

import vllm  # type: ignore[import-not-found]
from vllm import EngineArgs, LLMEngine, SamplingParams
from vllm.sampling_params import RequestOutputKind  # type: ignore[import-not-found]

from benchmarks.peers.protocol import MAX_BATCH_TOKENS, MAX_NUM_SEQS, Clock, Got, Run, Setup, Wanted, serve


def load(setup: Setup) -> Run:
    engine = LLMEngine.from_engine_args(
        EngineArgs(
            model=setup.model,
            dtype=setup.dtype,
            max_model_len=setup.max_model_len,
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=MAX_BATCH_TOKENS,
            enable_prefix_caching=setup.prefix_caching,
            disable_log_stats=True,
        )
    )
    for _ in range(2):  # it compiles on first use
        run(engine, [Wanted([5] * 20 * (place + 1), 6, 0.0) for place in range(8)])
    return lambda wanted: run(engine, wanted)


def run(engine: Any, wanted: list[Wanted]) -> list[Got]:
    got = [Got() for _ in wanted]
    clock, num_sent = Clock(), 0
    while num_sent < len(wanted) or engine.has_unfinished_requests():
        while num_sent < len(wanted) and wanted[num_sent].time_s <= clock.now_s():
            each = wanted[num_sent]
            params = SamplingParams(
                temperature=0, max_tokens=each.num_tokens, min_tokens=each.num_tokens, ignore_eos=True,
                detokenize=False, output_kind=RequestOutputKind.DELTA,
            )  # fmt: skip
            engine.add_request(str(num_sent), {"prompt_token_ids": each.prompt}, params)
            num_sent += 1
        if not engine.has_unfinished_requests():
            clock.sleep_until(wanted[num_sent].time_s)
            continue
        outputs = engine.step()
        now_s = clock.now_s()
        for output in outputs:
            place = int(output.request_id.split("-")[0])  # vLLM appends a random part
            got[place].add(list(output.outputs[0].token_ids), now_s)
    return got


if __name__ == "__main__":
    serve(vllm.__version__, load)
