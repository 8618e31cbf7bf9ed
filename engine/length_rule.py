"""Rotary frequencies that depend on the length of a sequence, as in the dynamic and longrope kinds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LengthRule:
    """How rotary frequencies depend on a sequence's length beyond `original` tokens.

    Without `switches`, a token's frequencies follow from the length of the sequence when the token came: the prompt's
    length, or the length up to the token. With it, the frequencies of all tokens follow from whether the sequence is
    longer than `original` by now, as in transformers' `generate` for Phi-3: at the crossing, earlier keys become
    invalid and are recomputed.

    Either is a function of the request and its tokens alone, whatever it is batched with and however it is chunked.
    """

    original: int
    switches: bool

    def rope_length(self, num_prompt: int, num_tokens: int) -> int:
        """Returns the least length that all keys of a sequence of `num_tokens` were rotated for; 0 means any.

        Keys of different rope lengths must not be mixed.
        """
        if self.switches:
            return self.original + 1 if num_tokens > self.original else 0
        return num_prompt if num_prompt > self.original else 0
