"""Prompt lookup (Saxena, "Prompt Lookup Decoding", 2023): a sequence continues as it did after the same tokens before.

Replies that quote, edit or summarize their input repeat much of it.
"""

from __future__ import annotations

from array import array

from penstock.engine.scheduling.sequence import Sequence
from penstock.engine.speculation.drafter import Draft

NGRAM = 3
"""Tokens that have to match before the next ones are guessed."""

MAX_PLACES = 2**16
"""Most entries in one sequence's table, 4 bytes each. A longer sequence finds earlier matches less often."""

_LONGEST_KIND = 5


class NgramDrafter:
    """Looks a sequence's last tokens up in its own prompt and output. Sequences that are never drafted cost nothing."""

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
    """Finds where the last tokens of a growing list occurred before: constant time for each token, bounded memory.

    A table maps the hash of a few tokens to the place after them; the newest wins, and a hit is compared with the
    tokens themselves. A match is followed from token to token as long as they agree, and past one token that was
    replaced: in an edited text what follows is unchanged.
    """

    __slots__ = ("_mask", "_num_read", "_place", "_table", "num_agreeing")

    def __init__(self, length: int) -> None:
        """Makes an index for a list of about `length` tokens."""
        num_places = 1 << min(max(2 * length, 64), MAX_PLACES).bit_length() - 1
        self._mask = num_places - 1
        self._table = array("I", bytes(4 * num_places))  # 0: empty, as no token comes before the first
        self._num_read = 0
        self._place = 0  # index of the guess at the next token; 0: none
        self.num_agreeing = 0
        """Least number of tokens that match before that place and at the end; 0 right after a replaced token."""

    def follow(self, tokens: list[int]) -> None:
        """Takes the tokens added since the last call; if they are many, only as many as the table can hold."""
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
        """Returns what followed the matching place, repeated if the end of the list cuts it off."""
        if not self._place:
            return ()
        behind = tokens[self._place : self._place + limit]
        return tuple(behind[i % len(behind)] for i in range(limit))
