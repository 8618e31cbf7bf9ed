"""Prompt lookup (Saxena, "Prompt Lookup Decoding", 2023): a sequence goes on as it did after these tokens before.

Replies that quote, edit or summarize what they were given repeat much of it.
"""

from __future__ import annotations

from array import array

from penstock.engine.scheduling.sequence import Sequence
from penstock.engine.speculation.drafter import Draft

NGRAM = 3
"""Tokens that have to agree before the next ones are guessed."""

MAX_PLACES = 2**16
"""Of one sequence's table, 4 bytes each. A longer sequence finds what is further back less often."""

_LONGEST_KIND = 5


class NgramDrafter:
    """Looks a sequence's last tokens up in its own prompt and output. What it is never asked for costs nothing."""

    def __init__(self) -> None:
        self._indexes: dict[Sequence, NgramIndex] = {}

    def draft(self, sequence: Sequence, limit: int) -> Draft:
        index = self._indexes.get(sequence)
        if index is None:
            length = sequence.num_prompt + sequence.request.sampling.max_tokens
            index = self._indexes[sequence] = NgramIndex(length)
        index.follow(sequence.token_ids)
        return Draft(index.guess(sequence.token_ids, limit), min(index.num_agreeing.bit_length(), _LONGEST_KIND))

    def forget(self, sequence: Sequence) -> None:
        self._indexes.pop(sequence, None)


class NgramIndex:
    """Where in a growing list of tokens its last ones came before: constant time for each token, bounded memory.

    A table of places by the hash of the tokens before them, the newest wins, and what it says is compared with the
    tokens themselves. Once a place is found it is followed from token to token, as long as they agree, and past one
    that was exchanged: in an edited text what comes behind it is as it was.
    """

    __slots__ = ("_mask", "_num_read", "_place", "_table", "num_agreeing")

    def __init__(self, length: int) -> None:
        """For a list that gets about so long."""
        num_places = 1 << min(max(2 * length, 64), MAX_PLACES).bit_length() - 1
        self._mask = num_places - 1
        self._table = array("I", bytes(4 * num_places))  # 0: nothing, as no token comes before the first
        self._num_read = 0
        self._place = 0  # the token there is the guess at the next one; 0: there is none
        self.num_agreeing = 0
        """Tokens, at least, that agree before that place and at the end; 0 right behind one that was exchanged."""

    def follow(self, tokens: list[int]) -> None:
        """Takes the tokens that came since; of many at once only as many as the table can tell apart."""
        end = len(tokens)
        if end - self._num_read > len(self._table):
            self._num_read, self._place = end - len(self._table), 0
        for last in range(max(self._num_read, NGRAM - 1), end):
            follows = self._place and tokens[self._place] == tokens[last]
            first, second, third = tokens[last - 2 : last + 1]
            slot = (first * 0x9E3779B1 ^ second * 0x85EBCA77 ^ third * 0xC2B2AE3D) >> 7 & self._mask
            if follows:
                self._place += 1
                self.num_agreeing += 1
            else:
                place = self._table[slot]
                if place and tokens[place - NGRAM : place] == [first, second, third]:
                    self._place, self.num_agreeing = place, NGRAM
                elif self._place and self.num_agreeing >= NGRAM:
                    self._place, self.num_agreeing = self._place + 1, 0
                else:
                    self._place = self.num_agreeing = 0
            self._table[slot] = last + 1
        self._num_read = end

    def guess(self, tokens: list[int], limit: int) -> tuple[int, ...]:
        """What came behind the place that agrees; where that is cut off by the end, over and over."""
        if not self._place:
            return ()
        behind = tokens[self._place : self._place + limit]
        return tuple(behind[i % len(behind)] for i in range(limit))
