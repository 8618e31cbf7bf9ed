"""Runs `penstock chaos`: starts a server if none is named, then the run, and cleans up."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from contextlib import ExitStack
from pathlib import Path

from penstock.engine.progress import ReportProgress
from penstock.local.embedded import EmbeddedServer
from penstock.tools.chaos.plan import ChaosOptions
from penstock.tools.chaos.run import ChaosOutcome, run_chaos
from penstock.tools.chaos.site import Site


def launch(options: ChaosOptions, *, redis_url: str | None, model: str, progress: ReportProgress) -> ChaosOutcome:
    """Runs chaos against the server at `redis_url`, or against a server of its own with an append-only file.

    The workers' logs stay in `ChaosOutcome.logs` if a promise was broken, and are removed otherwise.

    Raises:
        ValueError: the URL is not of a single server without TLS.
        EmbeddedServerError: there is no server program, or it does not start.
        RedisError: the server does not answer.
    """
    folder = Path(tempfile.mkdtemp(prefix="penstock-chaos-"))
    is_kept = True
    try:
        with ExitStack() as stack:
            server: EmbeddedServer | str
            if redis_url is None:
                data = folder / "data"
                data.mkdir()
                server = stack.enter_context(EmbeddedServer(data_dir=data))
            else:
                server = redis_url
            outcome = asyncio.run(run_chaos(options, Site(server), model=model, logs=folder, progress=progress))
        is_kept = outcome.verdict.is_kept
        return outcome
    finally:
        if is_kept:
            shutil.rmtree(folder)
