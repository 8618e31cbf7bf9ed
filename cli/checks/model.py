"""Checks whether a worker could load a model. Reads configuration, tokenizer and the weights' headers only."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from penstock.cli.checks import Finding
from penstock.engine.errors import ConfigError, EngineError, InvalidRequest
from penstock.engine.generation_defaults import GenerationDefaults, read_generation_defaults
from penstock.engine.loading.checkpoint import check_weights, read_model_config
from penstock.engine.loading.files import GENERATION_FILE
from penstock.engine.loading.naming.resolving import is_fetched, local
from penstock.engine.loading.source import open_checkpoint
from penstock.engine.models import FAMILIES, ModelConfig
from penstock.engine.text.bridges.limits import LIMITS
from penstock.engine.text.conversation import Conversation
from penstock.engine.text.tokenizer import Tokenizer

_AGAIN = "download the checkpoint again, or give --model another one"
_OTHER_FAMILY = f"give --model a checkpoint of a supported family: {', '.join(FAMILIES)}; the files are not damaged"
_TOKENIZER = "copy tokenizer.json and tokenizer_config.json of the model into its folder"
_FAST_TOKENIZER = "save a tokenizer.json: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"


def check_model(model: str, dtype: str) -> list[Finding]:
    """Returns findings for configuration, weights and tokenizer of a checkpoint."""
    path = local(model)
    if path is None:
        if is_fetched(model):
            detail = f"{model} is not here, or not known to be: the worker fetches it"
            return [Finding("model", "warn", detail, f"fetch it before: penstock pull {model}")]
        remedy = "give --model the folder of a checkpoint, or a GGUF file"
        return [Finding("model", "fail", f"there is no folder {model}", remedy)]
    config: list[ModelConfig] = []
    loaded: list[Tokenizer] = []

    def read_config() -> str:
        config.append(read_model_config(path, dtype))
        return f"{config[0].family}, {config[0].num_layers} layers, {config[0].max_position} positions, in {path}"

    def read_headers() -> str:
        return f"{check_weights(path, config[0]) / 2**20:,.1f} MiB, all tensors there"

    def read_tokenizer() -> str:
        tokenizer = Tokenizer.from_dir(path)
        loaded.append(tokenizer)
        if config:
            tokenizer.check_fits(config[0].vocab_size)
        return f"{tokenizer.vocab_size} tokens, {_chat(tokenizer)}"

    found = [_tried("model", read_config, _OTHER_FAMILY, _AGAIN)]
    if config:
        found.append(_tried("weights", read_headers, _AGAIN, _AGAIN))
    found.append(_tried("tokenizer", read_tokenizer, _FAST_TOKENIZER, _TOKENIZER))
    return [*found, *map(_check_template, loaded), _check_generation(path)]


def _check_generation(path: Path) -> Finding:
    name = "generation"
    try:
        defaults = read_generation_defaults(open_checkpoint(path))
    except EngineError as error:
        return Finding(name, "fail", str(error), f"correct {GENERATION_FILE}")
    if defaults.ignored:
        ignored = f"{GENERATION_FILE} sets fields that are not supported: {', '.join(defaults.ignored)}"
        remedy = f"take these fields out of {GENERATION_FILE} if you can do without them"
        return Finding(name, "warn", f"{ignored}; {_defaults(defaults)}", remedy)
    return Finding(name, "ok", _defaults(defaults))


def _defaults(defaults: GenerationDefaults) -> str:
    values = ", ".join(f"{name} {value:g}" for name, value in defaults.values().items())
    source = f"from {defaults.source}" if defaults.source else f"there is no {GENERATION_FILE}"
    return f"{values} ({source}); ends at {list(defaults.eos_token_ids)}"


def _chat(tokenizer: Tokenizer) -> str:
    try:
        tokenizer.encode_chat(Conversation([{"role": "user", "content": "hello"}]))
    except InvalidRequest as error:
        return f"only plain prompts can be sent: {error}"
    return "with a chat template"


def _check_template(tokenizer: Tokenizer) -> Finding:
    name = "template"
    try:
        limits = tokenizer.limits()
    except EngineError as error:
        return Finding(name, "fail", str(error), "correct the chat template, or take it out to serve plain prompts")
    told = "; ".join(LIMITS[limit].means for limit in limits) or "shows messages of all kinds as they are"
    if not tokenizer.templates:
        return Finding(name, "ok", "there is no chat template")
    read = "text" if tokenizer.chat_format is None else f"`{tokenizer.chat_format}`"
    return Finding(name, "ok", f"the chat template {told}; replies are read as {read}")


def _tried(name: str, look: Callable[[], str], unsupported: str, damaged: str) -> Finding:
    """Runs `look`, and says how to fix what it does not find.

    Args:
        name: name of the finding.
        look: returns what it found.
        unsupported: fix for sound files that need something unsupported.
        damaged: fix for a file that is missing or has wrong contents.
    """
    try:
        return Finding(name, "ok", look())
    except ConfigError as error:
        return Finding(name, "fail", str(error), unsupported)
    except EngineError as error:
        return Finding(name, "fail", str(error), damaged)
