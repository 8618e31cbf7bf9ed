"""Loads the parts of an engine from a checkpoint on disk."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

from penstock.engine.config import EngineConfig
from penstock.engine.deployment.deployment import Deployment, deploy
from penstock.engine.deployment.quickest import with_quickest
from penstock.engine.errors import EngineError
from penstock.engine.execution.compilation import keep_compilations
from penstock.engine.generation_defaults import GenerationDefaults, read_generation_defaults
from penstock.engine.loading.checkpoint import load_model, read_model_config
from penstock.engine.loading.naming.resolving import resolve
from penstock.engine.loading.source import open_checkpoint
from penstock.engine.models import Decoder
from penstock.engine.models.cpu.block import PackedDecoder, pack_block
from penstock.engine.models.cpu.panels import pack_head
from penstock.engine.models.layers.quantized import unpack_in_pieces
from penstock.engine.processors import bound_xla
from penstock.engine.progress import ReportProgress, silent
from penstock.engine.sharding.linears import prepare_for_tpu
from penstock.engine.text.tokenizer import Tokenizer


def open_model(
    model: str | Path, config: EngineConfig, progress: ReportProgress | None
) -> tuple[Decoder, Tokenizer, GenerationDefaults, Deployment]:
    """Loads a model, its tokenizer and its defaults. Raises CheckpointError and ConfigError as
    `Engine.from_checkpoint`.
    """
    bound_xla()
    unkept = None if config.compile_cache_dir is None else keep_compilations(config.compile_cache_dir)
    path = resolve(model)
    described = read_model_config(path, config.dtype, config.weights)
    with ThreadPoolExecutor(1, "tokenizer") as thread:  # most of its time goes into importing transformers
        making = thread.submit(_tokenizer, path, config, described.vocab_size)
        deployment = with_quickest(replace(deploy(config, described, progress=progress or silent), unkept=unkept))
        try:
            loaded = _model(path, deployment, _ended_by(making, progress))
        except EngineError:
            making.result()  # if it failed as well, its error is the one that is raised, whichever came first
            raise
        return loaded, making.result(), read_generation_defaults(open_checkpoint(path)), deployment


def _tokenizer(path: Path, config: EngineConfig, vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer.from_dir(path, config.chat_format, split_special_tokens=config.split_special_tokens)
    tokenizer.check_fits(vocab_size)
    return tokenizer


def _ended_by(making: Future[Tokenizer], progress: ReportProgress | None) -> ReportProgress:
    """Wraps `progress`, so that the loading of a large model ends as soon as its tokenizer turns out to be unusable."""

    def report(done: int, total: int, what: str) -> None:
        if making.done():
            making.result()
        if progress is not None:
            progress(done, total, what)

    return report


def _model(path: Path, deployment: Deployment, progress: ReportProgress) -> Decoder:
    """Loads the weights, and packs them as the deployment's kernels read them."""
    library = deployment.matmul_library
    loaded = load_model(
        path,
        deployment.model,
        progress,
        placement=deployment.placement,
        stacked=deployment.attention.is_stacked,
        pack_head=None if library is None else partial(pack_head, library=library),
        pack_block=None if library is None else partial(pack_block, library=library),
    )
    if library is not None:
        loaded = PackedDecoder(loaded)
    if deployment.platform == "tpu":
        loaded = prepare_for_tpu(loaded, deployment.placement)
    if deployment.unpacks_in_pieces:
        unpack_in_pieces(loaded)
    return loaded
