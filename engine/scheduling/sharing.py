"""How prompts share a step, so that a short one does not wait until a long one is computed."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import chain

from penstock.engine.scheduling.sequence import Sequence, SequenceFailed


def shares(
    running: Collection[Sequence], waiting: Iterable[Sequence], budget: int, page_size: int
) -> dict[Sequence, int]:
    """Tokens of prompts that go before the first that runs, in the order of their turns.

    First come prompts of a higher priority. Of what they leave, the first that runs gets at least half. Those of its
    own priority that have fewer tokens left share the rest, the shortest first. So a short prompt waits for no long
    one, and a stream of short ones makes a long one take twice as long at most: the shortest remaining time goes first,
    with a floor for who would starve. All others wait for their turn by rank.

    What shares the pages that a running prompt computes next is left to wait for them: it finds them in the prefix
    cache then, and computing them twice would help nobody.

    Args:
        running: prompts that run, by rank, at least one; some of their tokens are computed.
        waiting: sequences that do not run.
        budget: tokens that prompts may take of the step.
        page_size: tokens of a page.

    Raises:
        SequenceFailed: at one of them.
    """
    first, *others = running
    shared: dict[Sequence, int] = {}
    floor = min(first.num_pending, budget - budget // 2)
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
            floor = min(first.num_pending, budget - budget // 2)
    return shared


def _turn(sequence: Sequence) -> tuple[int, int, tuple[int, int, int]]:
    return -sequence.request.priority, sequence.num_pending, sequence.rank


def _is_shorter(sequence: Sequence, first: Sequence) -> bool:
    return sequence.request.priority == first.request.priority and sequence.num_pending < first.num_pending


def _waits_for_pages(sequence: Sequence, running: Iterable[Sequence], page_size: int) -> bool:
    """Whether the next page that one of `running` fills is this one's too, which does not run."""
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
