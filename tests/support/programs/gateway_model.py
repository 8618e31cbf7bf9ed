"""A gateway and a worker with a real model, which was not trained for the tools that its template shows."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from penstock.engine.demo import MODEL_DIR
from penstock.local.embedded import EmbeddedServer
from penstock.local.worker_process import local_worker, wait_joined
from tests.support.packages import ROOT
from tests.support.programs.gateway_harness import Running, running_gateway

QUEUE = "chats"
TEMPLATE = ROOT / "tests/chat_templates/hermes.jinja"
WORKER: dict[str, Any] = {
    "queue": QUEUE, "name": "real", "max_num_seqs": 8, "max_batch_tokens": 64, "num_pages": 520, "health_port": 0,
    "drain_timeout_s": 5, "log_level": "warning",
}  # fmt: skip


@asynccontextmanager
async def serving_model(directory: Path, compile_cache: Path, **settings: Any) -> AsyncIterator[Running]:
    """Serves the queue `chats` until the end of the block.

    Args:
        directory: empty directory for the model.
        compile_cache: directory of compiled programs.
        settings: of the worker, in addition to `WORKER`.
    """
    model = directory / "model"
    shutil.copytree(MODEL_DIR, model)
    shutil.copy(TEMPLATE, model / "chat_template.jinja")
    async with serving_checkpoint(model, compile_cache, **settings) as gateway:
        yield gateway


@asynccontextmanager
async def serving_checkpoint(model: Path, compile_cache: Path, **settings: Any) -> AsyncIterator[Running]:
    """Serves a checkpoint as `serving_model` does."""
    settings = {**WORKER, "model": str(model), "compile_cache_dir": str(compile_cache), **settings}
    with EmbeddedServer() as server:
        async with local_worker(server.url, settings) as worker:
            await wait_joined(worker, server.url, QUEUE, WORKER["name"])
            async with running_gateway(server.url) as gateway:
                yield gateway
