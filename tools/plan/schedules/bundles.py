"""The text of a kernel's schedule, as libtpu dumps it after its last pass (`*-final_bundles.txt`).

A line is a bundle: what a core starts in one cycle.

    0x65   : > { %231 = sbr.rel (%p9_p1) target = $region32  ;;  %s4_s2 = sadd.s32 1, %s3_s2 } /* Start region 31 */

It has an address, one `>` for each loop around it, operations, and the regions that begin or end there. `%s4_s2` is
value 4, in scalar register 2. An operation with a predicate in brackets does nothing if that is false; a move then
keeps the old value, which stands beside the predicate.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from penstock.engine.errors import EngineError

_HEAD = re.compile(r"^ *(0x[0-9a-f]+|0) +(?:[A-Z]{2})? *: *([> ]*)\{", re.MULTILINE)
_STARTED = re.compile(r"Start(?:/End empty)? region (\d+)")
_ENDED = re.compile(r"End region (\d+)")
_GENERAL = re.compile(r"dma\.general\b([^;]*?)/\* (\w+)-to-(\w+) \*/")  # TPU7x: its kind is in a comment
_COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
_RESULT = re.compile(r"(%\w+) = (.*)", re.DOTALL)
_PREDICATE = re.compile(r"\((!?)(%p\w+|[01])(?:, (%?[\w.-]+))?\)")
_OPERAND = re.compile(r"\[[^\]]*\]\]?|\$?%?[\w.-]+")
_ANNOTATION = re.compile(r"\[(?:thread|resolvable):[^\]]*\]")
_TARGET = re.compile(r"target = \$region(\d+)")
_INPUT = re.compile(r"inlined_call_operand\.(<no memory space>|\w+) \[shape: [^{]*?index: (\d+)")


class ScheduleError(EngineError):
    """A schedule cannot be made, read, or followed."""


@dataclass(frozen=True, slots=True)
class Predicate:
    name: str  # a predicate register's value, or "0" or "1"
    is_negated: bool
    otherwise: str | None  # what the result is if it does not hold


@dataclass(frozen=True, slots=True)
class Operation:
    opcode: str
    result: str | None  # a value, as `%s4_s2`, or what a later operation waits for, as `%231`
    operands: tuple[str, ...]
    predicate: Predicate | None
    target: int | None = None  # of a branch: a region
    input_index: int | None = None  # of an operand of the kernel

    @property
    def is_scalar(self) -> bool:
        """Whether the scalar unit has a part in it."""
        has_scalar = self.result is not None and self.result[1] in "sp"
        return has_scalar or self.target is not None or self.is_transfer or self.opcode.startswith(("sst", "sdivrem"))

    @property
    def is_spill(self) -> bool:
        return self.opcode in ("sst", "vst") and self._is_for_spills

    @property
    def is_fill(self) -> bool:
        return self.opcode in ("sld", "vld") and self._is_for_spills

    @property
    def is_transfer(self) -> bool:
        """Whether it starts a DMA."""
        return self.opcode.startswith("dma.") and self.opcode != "dma.done.wait"

    @property
    def is_bounds_check(self) -> bool:
        return self.opcode == "shalt.err"

    @property
    def _is_for_spills(self) -> bool:
        return bool(self.operands) and "_spill" in self.operands[0]


@dataclass(frozen=True, slots=True)
class Bundle:
    address: int
    depth: int  # loops around it
    operations: tuple[Operation, ...]
    regions: tuple[int, ...]  # those that begin here
    ends: tuple[int, ...]  # the regions whose last bundle it is


def bundles_of(text: str) -> tuple[Bundle, ...]:
    """Returns the bundles of a dump, in the order of their addresses. Raises ScheduleError if it has none, or gaps."""
    bundles = tuple(_bundles(text))
    if not bundles or [bundle.address for bundle in bundles] != list(range(len(bundles))):
        raise ScheduleError(f"a schedule's text has {len(bundles)} bundles that are not numbered from 0 on")
    return bundles


def _bundles(text: str) -> Iterator[Bundle]:
    heads = list(_HEAD.finditer(text))
    ends = [*(head.start() for head in heads[1:]), len(text)]
    for head, end in zip(heads, ends, strict=False):  # with no head there is an end
        body = text[head.end() : end]
        code = _COMMENT.sub("", _GENERAL.sub(r"dma.\2_to_\3\1", body))
        code = code[: code.rfind("}")]
        operations = tuple(_operation(part.strip()) for part in code.split(";;") if part.strip())
        started, ended = (tuple(map(int, found.findall(body))) for found in (_STARTED, _ENDED))
        yield Bundle(int(head[1], 16), head[2].count(">"), operations, started, ended)


def _operation(code: str) -> Operation:
    named = _RESULT.match(code)
    result, rest = (named[1], named[2]) if named else (None, code)
    opcode, _, arguments = rest.partition(" ")
    if given := _INPUT.match(rest):
        return Operation(opcode, result, (), None, input_index=int(given[2]))
    branch, found = _TARGET.search(arguments), _PREDICATE.search(arguments)
    predicate = Predicate(found[2], bool(found[1]), found[3]) if found else None
    if branch:
        return Operation(opcode, None, (), predicate, target=int(branch[1]))
    operands = _OPERAND.findall(_PREDICATE.sub("", _ANNOTATION.sub("", arguments)))
    return Operation(opcode, result, tuple(operands), predicate)
