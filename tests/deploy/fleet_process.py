"""Starts workers with the fake engine from the tree on PYTHONPATH, forked from a process that has imported everything.

Run as a program: each line of stdin is one worker, as JSON. Its exit status is written to the file that the line names.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from penstock.tools.chaos.fake_engine import FakeEngine, fake_model
from penstock.worker.config import WorkerConfig
from penstock.worker.logs import configure_logs
from penstock.worker.service import WorkerService


async def serve(url: str, config: dict[str, Any]) -> None:
    service = WorkerService(WorkerConfig(**config), url, lambda _: fake_model(FakeEngine(max_num_seqs=8, step_s=0.01)))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, service.request_drain)
    await service.run()


def work(line: dict[str, Any]) -> None:
    configure_logs("warning", "json", sys.stderr)
    place = Path(line["status"])
    try:
        asyncio.run(serve(line["url"], line["config"]))
        place.write_text("0")
    except BaseException as error:  # whatever it is, the test is to know
        place.write_text(repr(error))
        raise


if __name__ == "__main__":
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for text in sys.stdin:
        line = json.loads(text)
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            work(line)
            os._exit(0)
        sys.stdout.write(f"{pid}\n")
        sys.stdout.flush()
