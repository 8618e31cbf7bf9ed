"""Makes the card that a worker publishes for its queue."""

from __future__ import annotations

import dataclasses
import hashlib

from penstock.engine.loading.identity import Identity
from penstock.engine.stats import EngineInfo
from penstock.protocol.version import __version__
from penstock.protocol.wire import ModelCard
from penstock.worker.config import WorkerConfig

_OF_ENGINE = ("vocab_size", "max_model_len", "dtype", "attention", "matmul", "batch_invariant")
_LIMITS = ("max_body_bytes", "max_prompt_tokens", "max_n", "max_stop_strings", "max_stop_chars", "max_keep_s")


def make_card(
    model: str, config: WorkerConfig, info: EngineInfo | None, identity: Identity | None, chat_format: str | None
) -> ModelCard:
    """Makes the card of a worker with these settings and this model.

    Args:
        model: as it was set.
        config: the worker's.
        info: the engine's; None: unknown.
        identity: the checkpoint's; None: there is none.
        chat_format: how replies in chats are parsed; None: as plain text.
    """
    digest = None if identity is None else identity.digest(chat_format)
    of_checkpoint = {} if identity is None else {**dataclasses.asdict(identity), "digest": digest}
    of_engine = {} if info is None else {name: getattr(info, name) for name in _OF_ENGINE}
    of_engine["arithmetic"] = None if info is None else _arithmetic(info)
    limits = {name: getattr(config, name) for name in _LIMITS}
    first, *others = config.names_of(model)
    fields = {**of_checkpoint, **of_engine, **limits, "aliases": " ".join(others) or None}
    return ModelCard(model=first, worker=config.name, version=__version__, chat_format=chat_format, **fields)


def _arithmetic(info: EngineInfo) -> str | None:
    """Names the arithmetic of this version's engine: another version may compute a model in another order."""
    of_engine = info.arithmetic
    if of_engine is None:
        return None
    return hashlib.sha256(f"{of_engine} {__version__}".encode()).hexdigest()[: len(of_engine)]
