"""Penstock's bare engine, without speculation unless the options ask for it: other engines guess nothing either."""

from __future__ import annotations

from typing import cast

from benchmarks.engine import COMPILE_CACHE
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
from penstock.engine import Engine, Request, SamplingParams
from penstock.local.engine_options import EngineOptions, engine_config
from penstock.serving import garbage


def load(setup: Setup) -> Run:
    options = {
        "dtype": setup.dtype,
        "max_num_seqs": MAX_NUM_SEQS,
        "max_batch_tokens": MAX_BATCH_TOKENS,
        "max_model_len": setup.max_model_len,
        "kv_cache_bytes": KV_CACHE_GIB * 2**30,
        "prefix_caching": setup.prefix_caching,
        "compile_cache_dir": COMPILE_CACHE,
        "speculation": "off",
    }
    engine = Engine.from_checkpoint(setup.model, engine_config(cast(EngineOptions, options | setup.options)))
    engine.warm_up()
    engine.settle()
    garbage.settle()
    return lambda wanted: run(engine, wanted)


def run(engine: Engine, wanted: list[Wanted]) -> list[Got]:
    got = [Got() for _ in wanted]
    clock, num_sent = Clock(), 0
    while num_sent < len(wanted) or engine.has_work():
        while num_sent < len(wanted) and wanted[num_sent].time_s <= clock.now_s():
            params = SamplingParams(temperature=0.0, max_tokens=wanted[num_sent].num_tokens, ignore_eos=True)
            engine.add(Request(str(num_sent), tuple(wanted[num_sent].prompt), params))
            num_sent += 1
        if not engine.has_work():
            clock.sleep_until(wanted[num_sent].time_s)
            continue
        if (slack_s := engine.slack_s()) > 0.0:
            clock.sleep_until(clock.now_s() + slack_s)
            continue
        outputs = engine.step()
        now_s = clock.now_s()
        for output in outputs:
            got[int(output.request_id)].add(output.token_ids, now_s)
    return got


if __name__ == "__main__":
    serve("", load)
