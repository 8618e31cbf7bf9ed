"""Rotary frequencies that depend on how long a sequence is, as the dynamic and longrope kinds have them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LengthRule:
    """How frequencies follow from a sequence's length, where that is more than `original` tokens.

    Without `switches`, each token's follow from the length that the sequence had when it came: its prompt's, or that up
    to the token. With it, those of all tokens follow from whether the sequence is longer by now, as `generate` of
    transformers does it for Phi-3: at the crossing, keys from before are of no use and are computed again.

    Either is a function of the request and its tokens alone, whatever it is batched with and however it is cut up.
    """

    original: int
    switches: bool

    def rope_length(self, num_prompt: int, num_tokens: int) -> int:
        """What the keys of a sequence have in common, computed when it has `num_tokens`: its frequencies are those of
        this length at least. 0: of any. Keys of another one must not be mixed with them.
        """
        if self.switches:
            return self.original + 1 if num_tokens > self.original else 0
        return num_prompt if num_prompt > self.original else 0
