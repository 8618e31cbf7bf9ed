"""Digests that tell checkpoints apart: cheap, so that the workers of a queue can compare theirs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.engine.loading.source import Checkpoint, open_checkpoint

DIGEST_CHARS = 32
AS_STORED = "auto"

# What decides tokens and their text, apart from the format of chats. A field that is None takes no part.
DECISIVE = (
    *("weights", "tokenizer", "template", "template_rules", "reading_rules", "text_rules"),
    *("generation_defaults", "logprobs_mode"),
)


@dataclass(frozen=True, slots=True)
class Identity:
    """The digests of a checkpoint on disk. Equal digests mean equal contents."""

    revision: str | None  # the commit, for a model from the hub
    weights: str  # of config.json, of the weight files' names, sizes and samples, and of how they are held and used
    tokenizer: str  # of what the tokenizer does, whatever else its files say
    template: str | None  # of the chat templates, if there is one
    template_limits: str | None = None  # what these cannot do, by the names in `text/bridges/limits.py`
    template_rules: str | None = None  # by which conversations are made to fit them; None: none are
    reading_rules: str | None = None  # by which replies to chats are read; None: as text
    text_rules: str | None = None  # version of the rules by which tokens become text
    generation_defaults: str | None = None  # as JSON, what holds for parameters that a request leaves open
    generation_source: str | None = None  # where the checkpoint states them
    logprobs_mode: str | None = None  # the setting of that name

    def digest(self, chat_format: str | None) -> str:
        """Returns a digest of everything, and of how replies are parsed: workers with equal ones can continue each
        other's replies.
        """
        decisive = {"chat_format": chat_format, **{name: getattr(self, name) for name in DECISIVE}}
        return _digest(json.dumps({name: value for name, value in sorted(decisive.items()) if value is not None}))


def identify(
    path: Path,
    templates: Mapping[str, str],
    token_rules: str,
    *,
    limits: Sequence[str] = (),
    template_rules: str | None = None,
    reading_rules: str | None = None,
    text_rules: str | None = None,
    generation_defaults: str | None = None,
    generation_source: str | None = None,
    logprobs_mode: str | None = None,
    held_as: str = AS_STORED,
    activations: str = AS_STORED,
) -> Identity:
    """Identifies a checkpoint. Reads little of the weights, whatever their size.

    Args:
        path: the checkpoint's, a folder or a GGUF file.
        templates: as in `Tokenizer.templates`.
        token_rules: as `Tokenizer.rules` gives them.
        limits: the templates', as `Tokenizer.limits` gives them.
        template_rules: as `rules_of` gives them for these limits.
        reading_rules: as `Tokenizer.reading_rules` gives them.
        text_rules: version of the rules by which tokens become text.
        generation_defaults: as `GenerationDefaults.spelled` gives them.
        generation_source: where the checkpoint states them.
        logprobs_mode: the setting of that name.
        held_as: the setting `weights`: quantized weights differ from those they are made from.
        activations: the setting of that name: other activations make another model of the same weights.

    Raises:
        CheckpointError: a file is missing or unreadable.
    """
    checkpoint = open_checkpoint(path)
    return Identity(
        revision=checkpoint.revision,
        weights=_weights(checkpoint, held_as, activations),
        tokenizer=_digest(token_rules),
        template=_digest(json.dumps(templates, sort_keys=True)) if templates else None,
        template_limits=" ".join(limits) or None,
        template_rules=template_rules,
        reading_rules=reading_rules,
        text_rules=text_rules,
        generation_defaults=generation_defaults,
        generation_source=generation_source,
        logprobs_mode=logprobs_mode,
    )


def _digest(text: str | bytes) -> str:
    """Returns the first hex digits of SHA-256."""
    return hashlib.sha256(text.encode() if isinstance(text, str) else text).hexdigest()[:DIGEST_CHARS]


def _weights(checkpoint: Checkpoint, held_as: str, activations: str) -> str:
    found = hashlib.sha256()
    for part in checkpoint.contents():
        found.update(part)
    if held_as != AS_STORED:
        found.update(held_as.encode())
    if activations != AS_STORED:
        found.update(f"activations {activations}".encode())
    return found.hexdigest()[:DIGEST_CHARS]
