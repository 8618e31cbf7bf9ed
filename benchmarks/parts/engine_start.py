"""One start of an engine, as `penstock worker` starts it: `benchmarks.second_start` runs it in a process of its own."""

from __future__ import annotations

import json
import sys
import time
from importlib import import_module
from pathlib import Path

from penstock.serving import garbage


def main() -> None:
    """Prints as JSON the seconds of imports, counted from the time in the last argument, of loading and of warm-up."""
    folder, dtype, cache, since_s = sys.argv[1:]
    with garbage.paused():
        import_module("penstock.cli.shared.serve")  # what the command needs beside the engine
        from penstock.engine.config import EngineConfig
        from penstock.engine.engine import Engine

    imported_s = time.time() - float(since_s)
    settings = EngineConfig(dtype=dtype, max_model_len=1024, kv_cache_bytes=2**30, compile_cache_dir=Path(cache))
    begun_s = time.perf_counter()
    with garbage.paused():
        engine = Engine.from_checkpoint(folder, settings)
        loaded_s = time.perf_counter()
        engine.warm_up()
        garbage.settle()
    parts = {"imports s": imported_s, "load s": loaded_s - begun_s, "warm-up s": time.perf_counter() - loaded_s}
    print(json.dumps(parts))


if __name__ == "__main__":
    main()
