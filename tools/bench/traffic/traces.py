"""Reads the load of a trace: recorded requests with their arrivals, lengths and shared beginnings.

A file of JSON objects, one a line, or a CSV file with a header. Fields are recognized by name. These formats all work:

| trace | arrival | lengths | shared beginnings |
| --- | --- | --- | --- |
| Penstock's (`penstock plan --trace`) | `arrival_s` | `prompt_tokens`, `output_tokens` | `prefix_id`, `prefix_tokens` |
| Mooncake, and similar ones | `timestamp`, ms | `input_length`, `output_length` | `hash_ids`, 512 tokens each |
| Qwen-Bailian, with `chat_id` | `timestamp`, s | `input_length`, `output_length` | `hash_ids`, 16 tokens each |
| Azure LLM inference, CSV | `TIMESTAMP`, date and time | `ContextTokens`, `GeneratedTokens` | |
| BurstGPT, CSV | `Timestamp`, s | `Request tokens`, `Response tokens` | |

A line may also have `tenant`, `priority` and `affinity`, which are sent with it. Lines may be in any order; the first
to arrive does so at once. Penstock's `max_tokens` is for plans only: a replay generates `output_tokens` and ends.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from penstock.protocol.ranks import HIGHEST_PRIORITY, LOWEST_PRIORITY
from penstock.protocol.wire import ID_PATTERN
from penstock.tools.bench.errors import ImpossibleLoad
from penstock.tools.bench.traffic.arrivals import TracedArrivals
from penstock.tools.bench.traffic.block_prompts import BlockPrompt
from penstock.tools.bench.traffic.datasets import BenchRequest

MOONCAKE_BLOCK, BAILIAN_BLOCK = 512, 16  # tokens that a hash id stands for
_MAX_TOKENS = 2**24  # in one request: more than any model takes
_MAX_S = 1e10  # a Unix time fits

_CSV_NAMES = {
    "TIMESTAMP": "datetime", "ContextTokens": "prompt_tokens", "GeneratedTokens": "output_tokens",
    "Timestamp": "arrival_s", "Request tokens": "prompt_tokens", "Response tokens": "output_tokens",
}  # fmt: skip
_NAMES = {"input_length": "prompt_tokens", "output_length": "output_tokens", "input_tokens": "prompt_tokens"}
_ARRIVALS = ("arrival_s", "timestamp", "datetime")
_LENGTHS = ("prompt_tokens", "output_tokens")
_WHOSE = ("tenant", "priority", "affinity")
_SHARED = ("prefix_id", "prefix_tokens", "hash_ids")
_OF_BAILIAN = ("chat_id", "parent_chat_id", "type", "turn")
_UNUSED = ("max_tokens", *_OF_BAILIAN, "Model", "Total tokens", "Log Type", "Session ID", "Elapsed time")
_KNOWN = {*_ARRIVALS, *_LENGTHS, *_WHOSE, *_SHARED, *_UNUSED}


@dataclass(frozen=True, slots=True)
class TracedLine:
    arrival_s: float
    num_prompt: int
    num_output: int
    blocks: tuple[str, ...] = ()  # that the prompt begins with, each of `block_size` tokens, `num_shared` in all
    block_size: int = MOONCAKE_BLOCK
    num_shared: int = 0
    tenant: str | None = None
    priority: int = 0
    affinity: str | None = None
    source: str = ""


@dataclass(frozen=True, slots=True)
class BenchTrace:
    """Requests in order of arrival."""

    lines: tuple[TracedLine, ...]

    def arrivals(self, speed: float = 1.0) -> TracedArrivals:
        first_s = self.lines[0].arrival_s
        return TracedArrivals(tuple(line.arrival_s - first_s for line in self.lines), speed)

    def requests(self, vocab_size: int, seed: int, turn: int) -> list[BenchRequest]:
        """Returns the requests. Each `turn` has other token ids, shared in the same way."""
        return [
            BenchRequest(
                BlockPrompt(
                    line.blocks, line.block_size, line.num_shared, line.num_prompt, str(place), vocab_size,
                    f"{seed}/{turn}",
                ),
                line.num_output,
                tenant=line.tenant, priority=line.priority, affinity=line.affinity, source=line.source,
            )
            for place, line in enumerate(self.lines)
        ]  # fmt: skip


def read_trace(path: Path, count: int | None = None, block_size: int | None = None) -> BenchTrace:
    """Returns the first `count` requests to arrive; None: all.

    Args:
        path: the file; CSV if the name ends in `.csv`.
        count: the number of requests.
        block_size: tokens of a prompt that each of `hash_ids` stands for, if not the number of the format.

    Raises:
        ImpossibleLoad: the file can't be read or holds fewer requests, or a line is wrong: the message names the file,
            the line and the value.
    """
    option = f"--trace {path}"
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = _csv_rows(option, file) if path.suffix.lower() == ".csv" else _json_rows(option, file)
            found = [_line(f"{option}, line {number}", fields, block_size) for number, fields in rows]
    except (OSError, UnicodeDecodeError) as error:
        raise ImpossibleLoad(f"{option} cannot be read: {error}") from error
    if len(found) < (count or 1):
        raise ImpossibleLoad(f"{option} holds {len(found)} requests, fewer than the {count or 1} asked for")
    return BenchTrace(tuple(sorted(found, key=lambda line: line.arrival_s)[:count]))


def _json_rows(option: str, file: Iterable[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, text in enumerate(file, start=1):
        if not text.strip():
            continue
        try:
            fields = json.loads(text)
        except (ValueError, RecursionError):
            raise ImpossibleLoad(f"{option}, line {number}: not JSON: {_shown(text.strip())}") from None
        if not isinstance(fields, dict):
            raise ImpossibleLoad(f"{option}, line {number}: not a JSON object: {_shown(fields)}")
        yield number, {_NAMES.get(str(name), str(name)): value for name, value in fields.items()}


def _csv_rows(option: str, file: Iterable[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    reader = csv.reader(file)
    known = {**_NAMES, **_CSV_NAMES}
    names: list[str] = [known.get(name.strip(), name.strip()) for name in next(reader, [])]
    for values in reader:
        if not values:
            continue
        if len(values) != len(names):
            raise ImpossibleLoad(f"{option}, line {reader.line_num}: {len(values)} values, not {len(names)}: {values}")
        given = {name: value.strip() for name, value in zip(names, values, strict=True) if value.strip()}
        yield reader.line_num, {name: _number(name, value) for name, value in given.items()}


def _number(name: str, text: str) -> Any:
    """Parses a CSV value; one that should be a number but is not stays text, for the error to name."""
    kind: Callable[[str], Any] = float if name in ("arrival_s", "timestamp") else int
    if name not in ("arrival_s", "timestamp", *_LENGTHS, "priority", "prefix_tokens"):
        return text
    try:
        return kind(text)
    except ValueError:
        return text


def _line(where: str, fields: Mapping[str, Any], block_size: int | None) -> TracedLine:
    try:
        return _checked(where, fields, block_size)
    except _Wrong as error:
        raise ImpossibleLoad(f"{where}: {error}") from None


def _checked(where: str, fields: Mapping[str, Any], block_size: int | None) -> TracedLine:
    if unknown := sorted(fields.keys() - _KNOWN):
        raise _Wrong(f"unknown field {_shown(unknown[0])}")
    for name in _LENGTHS:
        if name not in fields:
            raise _Wrong(f"{name} is missing")
    num_prompt, num_output = (_count(name, fields[name]) for name in _LENGTHS)
    is_bailian = "chat_id" in fields
    size = block_size or (BAILIAN_BLOCK if is_bailian else MOONCAKE_BLOCK)
    blocks, num_shared = _blocks(fields, num_prompt, size)
    priority = fields.get("priority", 0)
    if (
        not isinstance(priority, int)
        or isinstance(priority, bool)
        or not LOWEST_PRIORITY <= priority <= HIGHEST_PRIORITY
    ):
        raise _Wrong(
            f"priority must be a whole number from {LOWEST_PRIORITY} to {HIGHEST_PRIORITY}, not {_shown(priority)}"
        )
    return TracedLine(
        _arrival_s(fields, is_bailian=is_bailian), num_prompt, num_output, blocks, size, num_shared,
        _name(fields, "tenant"), priority, _name(fields, "affinity"), where,
    )  # fmt: skip


def _arrival_s(fields: Mapping[str, Any], *, is_bailian: bool) -> float:
    given = [name for name in _ARRIVALS if name in fields]
    if len(given) != 1:
        raise _Wrong("timestamp is missing" if not given else f"{' and '.join(given)} both give its arrival time")
    value = fields[given[0]]
    if given[0] == "datetime":
        return _moment_s(value)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= _MAX_S * 1000:
        raise _Wrong(f"{given[0]} must be a number from 0, not {_shown(value)}")
    return float(value) if given[0] == "arrival_s" or is_bailian else value / 1000


def _moment_s(text: str) -> float:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise _Wrong(f"TIMESTAMP must be a date and time, not {_shown(text)}") from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _blocks(fields: Mapping[str, Any], num_prompt: int, size: int) -> tuple[tuple[str, ...], int]:
    """Returns the blocks that a prompt begins with, and how many of its tokens they cover."""
    if "hash_ids" in fields:
        if "prefix_id" in fields:
            raise _Wrong("hash_ids and prefix_id both say what the prompt begins with: give one")
        ids = fields["hash_ids"]
        if not isinstance(ids, list) or not all(_is_id(each) for each in ids):
            raise _Wrong(f"hash_ids must be a list of numbers or texts, not {_shown(ids)}")
        if len(ids) > -(-num_prompt // size):
            raise _Wrong(
                f"hash_ids has {len(ids)} blocks of {size} tokens, more than a prompt of {num_prompt} tokens has; "
                f"--trace-block says how many tokens a block has"
            )
        return tuple(f"hash {each}" for each in ids), min(num_prompt, len(ids) * size)
    if ("prefix_id" in fields) != ("prefix_tokens" in fields):
        raise _Wrong("prefix_id and prefix_tokens need each other")
    if "prefix_id" not in fields:
        return (), 0
    name, num_shared = fields["prefix_id"], _count("prefix_tokens", fields["prefix_tokens"])
    if not isinstance(name, str) or not name:
        raise _Wrong(f"prefix_id must be a text that is not empty, not {_shown(name)}")
    if num_shared > num_prompt:
        raise _Wrong(f"prefix_tokens must be at most the prompt's {num_prompt}, not {num_shared}")
    return tuple(f"prefix {name} {place}" for place in range(-(-num_shared // size))), num_shared


def _is_id(value: Any) -> bool:
    return isinstance(value, int | str) and not isinstance(value, bool)


def _count(name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _MAX_TOKENS:
        raise _Wrong(f"{name} must be a whole number from 1 to {_MAX_TOKENS}, not {_shown(value)}")
    return value


def _name(fields: Mapping[str, Any], name: str) -> str | None:
    value: str | None = fields.get(name)
    if value is not None and not (isinstance(value, str) and ID_PATTERN.fullmatch(value)):
        raise _Wrong(f"{name} must be 1 to 128 letters, digits or any of _.:-, not {_shown(value)}")
    return value


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


class _Wrong(Exception):
    """Raised with what is wrong in a line, without the line's place."""
