"""What a real engine generates where nobody is killed, and workers that have one."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import Any

from penstock.cli.shared.serve import load_model
from penstock.engine import Engine, EngineConfig
from penstock.producer import GenerateRequest
from penstock.worker.config import WorkerConfig
from penstock.worker.intake.admission import to_engine_request
from penstock.worker.intake.preparation import Preparer
from penstock.worker.service import WorkerService
from tests.support.programs.worker_harness import serving


def undisturbed(engine: Engine, asked: Mapping[str, GenerateRequest]) -> dict[str, list[tuple[str, list[int]]]]:
    """Returns text and tokens of each choice, as an engine generates them that nobody kills."""
    preparer = Preparer(engine.tokenizer, WorkerConfig(), engine.grammars)
    choices = {name: [("", list[int]())] * each.n for name, each in asked.items()}
    for each in asked.values():
        engine.add(to_engine_request(each, preparer.prepare(each), engine.defaults))
    while engine.has_work():
        for output in engine.step():
            own = choices[output.request_id]
            text, tokens = own[output.index]
            own[output.index] = (text + output.text, [*tokens, *output.token_ids])
    return choices


def late_text(text: str, length: int = 4) -> str:
    """Returns a piece of the last third of a text that is nowhere before: a stop string that ends it late."""
    places = range(len(text) * 2 // 3, len(text) - length)
    return next(text[at : at + length] for at in places if text.find(text[at : at + length]) == at)


def real_worker(url: str, model: Path, config: EngineConfig, **settings: Any) -> AbstractAsyncContextManager[None]:
    """Serves the queue `q` with a model until the end of the block."""
    return serving(real_service(url, model, config, **settings))


def real_service(url: str, model: Path, config: EngineConfig, **settings: Any) -> WorkerService:
    """Makes a worker of the queue `q`, which is not started."""
    worker = WorkerConfig(**{"queue": "q", "health_port": None, **settings})
    return WorkerService(worker, url, partial(load_model, str(model), config))
