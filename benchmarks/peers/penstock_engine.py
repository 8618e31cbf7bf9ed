"""Penstock's bare engine."""

from __future__ import annotations

from pathlib import Path

from benchmarks.engine import COMPILE_CACHE
from benchmarks.peers.protocol import KV_CACHE_GIB, Clock, Got, Run, Wanted, serve
from penstock.engine import Engine, EngineConfig, Request, SamplingParams
from penstock.worker import garbage


def load(model: Path, dtype: str) -> Run:
    config = EngineConfig(
        dtype=dtype,
        max_num_seqs=64,
        max_batch_tokens=512,
        max_model_len=1024,
        kv_cache_bytes=KV_CACHE_GIB * 2**30,
        prefix_caching=False,
        compile_cache_dir=COMPILE_CACHE,
    )
    engine = Engine.from_checkpoint(model, config)
    engine.warm_up()
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
        outputs = engine.step()
        now_s = clock.now_s()
        for output in outputs:
            got[int(output.request_id)].add(output.token_ids, now_s)
    return got


if __name__ == "__main__":
    serve("", load)
