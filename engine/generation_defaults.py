"""The sampling defaults and end-of-sequence ids that a checkpoint's authors recommend."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from penstock.engine.errors import CheckpointError, InvalidRequest, shown
from penstock.engine.loading.files import GENERATION_FILE
from penstock.engine.request import MAX_STOP_TOKENS, SamplingParams
from penstock.parameters import FIRST, MODEL, Parameter, SamplingParameters, declared

# Fields that change which tokens are chosen and have no counterpart here, with the value that means "off".
NOT_HONOURED: Mapping[str, Any] = {
    "num_beams": 1,
    "no_repeat_ngram_size": 0,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "penalty_alpha": None,
    "guidance_scale": 1.0,
    "min_length": 0,
    "min_new_tokens": None,
    "bad_words_ids": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "sequence_bias": None,
    "exponential_decay_length_penalty": None,
    "stop_strings": None,
}


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Defaults for parameters that a request leaves out.

    `ignored` lists, as `name=value`, the fields of generation_config.json that would change the output and are not
    honoured. The worker logs them after loading the model. `source` is where the checkpoint states defaults, and which
    parameters it states.
    """

    eos_token_ids: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    ignored: tuple[str, ...] = ()
    source: str | None = field(default=None, compare=False)

    def within(self, vocab_size: int) -> GenerationDefaults:
        """Drops ids that the model never samples: some checkpoints name one beyond their vocabulary."""
        return replace(self, eos_token_ids=tuple(id_ for id_ in self.eos_token_ids if id_ < vocab_size))

    def values(self) -> dict[str, Any]:
        """Returns all values that hold, by the parameters that a request may leave open."""
        return {name: getattr(self.sampling, name) for name in _with_a_default()}

    def spelled(self) -> str:
        """Returns as JSON what holds for a request that leaves parameters open. Equal texts generate the same.

        A parameter that is newer than the first version is left out unless it changes something: workers of a version
        without it then join the same queue.
        """
        known, neutral = _with_a_default(), SamplingParams()
        said = {
            name: value
            for name, value in self.values().items()
            if value != getattr(neutral, name) or known[name].since == FIRST
        }
        return json.dumps({**said, "eos_token_ids": self.eos_token_ids}, sort_keys=True)


class Stated(Protocol):
    """The part of `penstock.engine.loading.source.Checkpoint` used here, declared so as not to import jax."""

    @property
    def generation(self) -> Mapping[str, Any]: ...

    @property
    def generation_source(self) -> str | None: ...

    @property
    def fields(self) -> Mapping[str, Any]: ...


def read_generation_defaults(checkpoint: Stated) -> GenerationDefaults:
    """Reads generation_config.json, with config.json's `eos_token_id` if it has none, or a GGUF file's metadata.

    Without the file the defaults are plain sampling at temperature 1. With it, a `do_sample` that is written as false
    is greedy (temperature 0), as in transformers. Where it is absent or null, sampling is what the other fields say:
    files that only name token ids ask for nothing. A field that is absent or null filters nothing; in particular there
    is no implied `top_k` of 50.

    Raises:
        CheckpointError: a file is malformed, or a value in it is out of range.
    """
    fields = checkpoint.generation
    eos = fields.get("eos_token_id")
    if eos is None:
        eos = _config_field(checkpoint.fields, "eos_token_id")
    stated = _stated(fields)
    return GenerationDefaults(
        eos_token_ids=_token_ids(eos),
        sampling=_sampling(stated),
        ignored=tuple(
            f"{name}={shown(fields[name])}" for name, off in NOT_HONOURED.items() if fields.get(name) not in (None, off)
        ),
        source=_source(checkpoint.generation_source, stated),
    )


def _config_field(fields: Mapping[str, Any], name: str) -> Any:
    """Returns a field of config.json; models that also take images have some of their text fields in `text_config`."""
    text = fields.get("text_config")
    return text.get(name) if fields.get(name) is None and isinstance(text, dict) else fields.get(name)


def _token_ids(value: object) -> tuple[int, ...]:
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(id_, int) and not isinstance(id_, bool) and 0 <= id_ < 2**31 for id_ in ids):
        raise CheckpointError(f"eos_token_id must be a token id or a list of them, not {shown(value)}")
    if len(ids) > MAX_STOP_TOKENS:
        raise CheckpointError(f"eos_token_id lists {len(ids)} token ids, the limit is {MAX_STOP_TOKENS}")
    return tuple(dict.fromkeys(ids))


def _stated(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what the file says of the parameters that a model has defaults for."""
    stated: dict[str, Any] = {"temperature": 0.0} if _field(fields, "do_sample", bool) is False else {}
    for name, each in _with_a_default().items():
        if name not in stated and (value := _field(fields, name, each.type)) is not None:
            stated[name] = value
    return stated


def _with_a_default() -> dict[str, Parameter]:
    """Returns the parameters that a model has defaults for, by name."""
    return {name: each for name, each in declared(SamplingParameters).items() if each.otherwise == MODEL}


def _sampling(stated: Mapping[str, Any]) -> SamplingParams:
    try:
        return SamplingParams(**stated)
    except InvalidRequest as error:
        raise CheckpointError(f"{GENERATION_FILE}: {error}") from error


def _source(file: str | None, stated: Mapping[str, Any]) -> str | None:
    return f"{file}: {', '.join(stated)}" if file and stated else file


def _field(fields: Mapping[str, Any], name: str, kind: type) -> Any:
    value = fields.get(name)
    if kind is float and type(value) is int and abs(value) < 2**53:
        value = float(value)
    if value is not None and type(value) is not kind:
        raise CheckpointError(f"{GENERATION_FILE}: {name} must be of type {kind.__name__}, not {shown(value)}")
    return value
