"""How prompts share a step, so that a short one does not wait for a long one."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import chain

from penstock.engine.scheduling.sequence import Sequence, SequenceFailed


def shares(
    running: Collection[Sequence], waiting: Iterable[Sequence], budget: int, floor: int, page_size: int
) -> dict[Sequence, int]:
    """Returns the tokens of prompts that go before the first running one, in the order of their turns.

    Prompts of a higher priority come first. Of the rest, the first running prompt gets at least `floor`, or half of
    what they leave. Prompts of its own priority with fewer tokens left share what remains, the shortest first. So a
    short prompt never waits for a long one: shortest remaining time first, with a floor against starvation. All others
    wait for their turn by rank.

    A prompt that shares the pages that a running one computes next waits for them: it will find them in the prefix
    cache, and computing them twice would help nobody.

    Args:
        running: running prompts, by rank, at least one; some of their tokens are computed.
        waiting: sequences that do not run.
        budget: tokens that prompts may take of the step.
        floor: tokens among them that are the first running prompt's, unless a higher priority takes them.
        page_size: tokens of a page.

    Raises:
        SequenceFailed: hashing the pages of one of them failed.
    """
    first, *others = running
    shared: dict[Sequence, int] = {}
    for sequence in sorted(chain(others, waiting), key=_turn):
        is_higher = sequence.request.priority > first.request.priority
        if not (is_higher or _is_shorter(sequence, first)):
            continue
        count = min(sequence.num_pending, budget if is_higher else budget - floor)
        if count <= 0:
            break
        try:
            is_out = sequence.is_suspect or sequence.num_in_flight or _waits_for_pages(sequence, running, page_size)
        except Exception as error:
            raise SequenceFailed(sequence) from error
        if is_out:
            continue
        shared[sequence] = count
        budget -= count
        if is_higher:
            floor = min(floor, budget - budget // 2)
    return shared


def _turn(sequence: Sequence) -> tuple[int, int, tuple[int, int, int]]:
    return -sequence.request.priority, sequence.num_pending, sequence.rank


def _is_shorter(sequence: Sequence, first: Sequence) -> bool:
    return sequence.request.priority == first.request.priority and sequence.num_pending < first.num_pending


def _waits_for_pages(sequence: Sequence, running: Iterable[Sequence], page_size: int) -> bool:
    """Whether `sequence` is waiting and shares the page that a `running` prompt fills next, and will find it cached."""
    if sequence.batch_slot >= 0:
        return False
    for other in running:
        number = other.num_computed // page_size
        if (number + 1) * page_size > min(len(sequence.token_ids), len(other.token_ids)):
            continue
        if sequence.request.cache_salt != other.request.cache_salt or sequence.rope_length != other.rope_length:
            continue
        if sequence.page_hash(number, page_size) == other.page_hash(number, page_size):
            return True
    return False
