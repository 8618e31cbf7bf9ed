"""Builds the demo tokenizer: a byte-level BPE of 640 entries trained on the generator's own text.

Its pieces are chosen for arithmetic: every digit is a token, and the text before a number includes the space (` + `, `,
`), so numbers consist of digits only. It has all 256 bytes, so any text round-trips.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from random import Random

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from examples.demo_model.data import training_examples

VOCAB_SIZE = 640
PAD, END, SYSTEM, USER, ASSISTANT = range(5)
SPECIAL_TOKENS = ("<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")  # at the ids above

_PIECES = r"\p{N}| ?\p{L}+(?: (?=\p{N}))?| ?[^\s\p{L}\p{N}]+(?: (?=\p{N}))?|\s+"
_MIX = {"sum": 4, "count": 4, "spell": 2, "reverse": 2, "date": 3, "story": 2, "help": 1}


def build(num_examples: int = 20_000) -> Tokenizer:
    """Builds the tokenizer, the same on every run."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(_PIECES), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(num_examples), trainer)
    return tokenizer


def _texts(num_examples: int) -> Iterator[str]:
    for example in islice(training_examples(_MIX, Random("tokenizer")), num_examples):
        for problem in example.problems:
            yield problem.question
            yield problem.answer
