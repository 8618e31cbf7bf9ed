"""Loads the parts of an engine from a checkpoint on disk."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from penstock.engine.config import EngineConfig
from penstock.engine.deployment.deployment import Deployment, deploy
from penstock.engine.deployment.quickest import with_quickest
from penstock.engine.execution.compilation import keep_compilations
from penstock.engine.generation_defaults import GenerationDefaults, read_generation_defaults
from penstock.engine.loading.checkpoint import load_model, read_model_config
from penstock.engine.loading.naming.resolving import resolve
from penstock.engine.loading.source import open_checkpoint
from penstock.engine.models import Decoder
from penstock.engine.models.cpu.block import pack_blocks
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
    deployment = with_quickest(replace(deploy(config, described, progress=progress or silent), unkept=unkept))
    tokenizer = Tokenizer.from_dir(path, config.chat_format, split_special_tokens=config.split_special_tokens)
    tokenizer.check_fits(deployment.model.vocab_size)
    defaults = read_generation_defaults(open_checkpoint(path))
    library = deployment.matmul_library
    loaded = load_model(
        path,
        deployment.model,
        progress,
        placement=deployment.placement,
        stacked=deployment.attention.is_stacked,
        pack_head=None if library is None else partial(pack_head, library=library),
    )
    if library is not None:
        loaded = pack_blocks(loaded, library)
    if deployment.platform == "tpu":
        loaded = prepare_for_tpu(loaded, deployment.placement)
    if deployment.unpacks_in_pieces:
        unpack_in_pieces(loaded)
    return loaded, tokenizer, defaults, deployment
