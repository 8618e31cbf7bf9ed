"""Makes the requests of a benchmark."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from penstock.tools.bench.errors import ImpossibleLoad
from penstock.tools.bench.traffic.block_prompts import BlockPrompt, bounds
from penstock.tools.bench.traffic.lengths import Lengths

Said: TypeAlias = str | tuple[int, ...] | tuple[Mapping[str, str], ...]
"""Text, token ids or chat messages."""

Prompt: TypeAlias = Said | BlockPrompt

SHARED_PROMPTS = Lengths("loguniform", (16, 512))
SHARED_OUTPUTS = Lengths("uniform", (16, 128))
_PROMPT_FIELDS = ("prompt", "prompt_token_ids", "messages")


@dataclass(frozen=True, slots=True)
class BenchRequest:
    prompt: Prompt
    max_tokens: int
    ignore_eos: bool = True  # so that every engine generates the same amount
    tenant: str | None = None
    priority: int = 0
    affinity: str | None = None
    source: str = ""  # line of the trace, for messages

    def said(self) -> Said:
        """Returns the prompt as it is sent. Block prompts are generated on each call, which keeps loads small."""
        return self.prompt.token_ids() if isinstance(self.prompt, BlockPrompt) else self.prompt

    def whose(self) -> dict[str, str | int]:
        """Returns what a queue schedules by, as far as it is given."""
        values = {"tenant": self.tenant, "priority": self.priority or None, "affinity": self.affinity}
        return {name: value for name, value in values.items() if value is not None}


def random_requests(
    count: int,
    vocab_size: int,
    *,
    prompt_length: Lengths = SHARED_PROMPTS,
    output_length: Lengths = SHARED_OUTPUTS,
    seed: int = 0,
) -> list[BenchRequest]:
    """Returns prompts of random token ids. The default lengths are those that engines are compared on."""
    rng = np.random.default_rng(seed)
    prompts, outputs = prompt_length.draw(rng, count), output_length.draw(rng, count)
    return [
        BenchRequest(_random_ids(rng, length, vocab_size), output)
        for length, output in zip(prompts, outputs, strict=True)
    ]


def shared_prefix_requests(
    count: int,
    vocab_size: int,
    *,
    prefix_length: int,
    num_prefixes: int,
    prompt_length: Lengths,
    output_length: Lengths,
    seed: int = 0,
) -> list[BenchRequest]:
    """Returns prompts that begin with one of `num_prefixes` prefixes, in turn, and go on with ids of their own."""
    rng = np.random.default_rng(seed)
    prefixes = [_random_ids(rng, prefix_length, vocab_size) for _ in range(num_prefixes)]
    own = random_requests(
        count, vocab_size, prompt_length=prompt_length, output_length=output_length, seed=int(rng.integers(2**31))
    )
    return [
        BenchRequest((*prefixes[at % num_prefixes], *_ids(request.said())), request.max_tokens)
        for at, request in enumerate(own)
    ]


def with_other_ids(requests: list[BenchRequest], vocab_size: int, turn: int) -> list[BenchRequest]:
    """Returns the same lengths and shared prefixes with other random ids, unknown to any cache; turn 0 changes none."""
    low, high = bounds(vocab_size)
    return [
        BenchRequest(
            tuple(low + (id_ - low + 97 * turn) % (high - low) for id_ in _ids(request.said())), request.max_tokens
        )
        for request in requests
    ]


def file_requests(path: Path, count: int | None, output_length: Lengths, seed: int = 0) -> list[BenchRequest]:
    """Reads requests from a JSONL file: each line has `prompt`, `messages` or `prompt_token_ids`, and maybe
    `max_tokens`.

    A line without `max_tokens` takes one from `output_length`. Replies may end before that.

    Raises:
        ImpossibleLoad: the file can't be read, holds fewer than `count` lines, or a line is not understood.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ImpossibleLoad(f"--dataset {path} cannot be read: {error}") from error
    lines = [(number, line) for number, line in enumerate(text.splitlines(), start=1) if line.strip()]
    if not lines or len(lines) < (count or 1):
        raise ImpossibleLoad(f"--dataset {path} holds {len(lines)} requests, fewer than the {count or 1} asked for")
    outputs = output_length.draw(np.random.default_rng(seed), len(lines))
    chosen = zip(lines[:count], outputs, strict=False)
    return [_from_line(f"--dataset {path}, line {number}", line, length) for (number, line), length in chosen]


def _from_line(where: str, line: str, default_length: int) -> BenchRequest:
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise ImpossibleLoad(f"{where}: not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ImpossibleLoad(f"{where}: {type(fields).__name__} instead of an object")
    unknown = sorted(fields.keys() - {*_PROMPT_FIELDS, "max_tokens"})
    given = [name for name in _PROMPT_FIELDS if name in fields]
    if unknown or len(given) != 1:
        raise ImpossibleLoad(
            f"{where}: needs exactly one of {', '.join(_PROMPT_FIELDS)}, and at most max_tokens beside it, "
            f"not {sorted(fields)}"
        )
    max_tokens = fields.get("max_tokens", default_length)
    if not isinstance(max_tokens, int) or isinstance(max_tokens, bool) or max_tokens < 1:
        raise ImpossibleLoad(f"{where}: max_tokens must be a number from 1, not {max_tokens!r}")
    prompt = fields[given[0]]
    if not prompt or not all(_is_of_kind(given[0], part) for part in _parts(given[0], prompt, where)):
        raise ImpossibleLoad(f"{where}: {given[0]} is empty or of the wrong kind")
    return BenchRequest(prompt if isinstance(prompt, str) else tuple(prompt), max_tokens, ignore_eos=False)


def _parts(name: str, prompt: Any, where: str) -> Iterator[Any]:
    if isinstance(prompt, str) != (name == "prompt") or not isinstance(prompt, str | list):
        raise ImpossibleLoad(f"{where}: {name} is {type(prompt).__name__}")
    return iter(prompt)


def _is_of_kind(name: str, part: Any) -> bool:
    if name == "messages":
        return isinstance(part, dict) and part.keys() == {"role", "content"}
    return isinstance(part, str if name == "prompt" else int)


def _random_ids(rng: np.random.Generator, length: int, vocab_size: int) -> tuple[int, ...]:
    return tuple(rng.integers(*bounds(vocab_size), length).tolist())


def _ids(prompt: Said) -> tuple[int, ...]:
    return tuple(part for part in prompt if isinstance(part, int))
