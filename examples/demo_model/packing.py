"""Turns conversations into token ids with a loss mask, and packs many of them into the rows of one training batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import jax
import numpy as np
from tokenizers import Tokenizer

from examples.demo_model.data import Example
from examples.demo_model.tokenizer import ASSISTANT, END, PAD, SYSTEM, USER

_GIVE_UP_AFTER = 6  # examples in a row that fit in no row


@dataclass(frozen=True, slots=True)
class Encoded:
    """One conversation. `trained[i]` says whether predicting `token_ids[i]` counts in the loss."""

    token_ids: list[int]
    trained: list[bool]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class Batch:
    """Packed rows, each array i32 `[num_rows, row_length]`.

    Positions restart with every document, as they do at inference. Documents number from 1; 0 is padding. A target of
    -1 does not count.
    """

    token_ids: np.ndarray
    targets: np.ndarray
    positions: np.ndarray
    documents: np.ndarray


def encode(example: Example, tokenizer: Tokenizer) -> Encoded:
    """Encodes an example as the chat template renders it; the loss is on answers and the marks around them.

    A plain example lacks the first user mark, and the assistant's mark is its first token to predict. That makes the
    model answer a bare prompt too.
    """
    texts = [text for problem in example.problems for text in (problem.question, problem.answer)]
    pieces = [encoding.ids for encoding in tokenizer.encode_batch(texts, add_special_tokens=False)]
    token_ids: list[int] = []
    trained: list[bool] = []
    if example.system is not None:
        token_ids += [SYSTEM, *tokenizer.encode(example.system, add_special_tokens=False).ids]
        trained += [False] * len(token_ids)
    for turn, (question, answer) in enumerate(zip(pieces[::2], pieces[1::2], strict=True)):
        opened = [] if example.plain and turn == 0 else [USER]
        token_ids += [*opened, *question, ASSISTANT, *answer, END]
        trained += [False] * (len(opened) + len(question)) + [True] * (len(answer) + 2)
    return Encoded(token_ids, trained)


def pack(examples: Iterator[Encoded], num_rows: int, row_length: int) -> Batch:
    """Fills `num_rows` rows with whole examples, each in the first row with space; skips any longer than a row."""
    rows: list[list[Encoded]] = [[] for _ in range(num_rows)]
    space = [row_length] * num_rows
    misses = 0
    while misses < _GIVE_UP_AFTER:
        example = next(examples)
        row = next((row for row in range(num_rows) if space[row] >= len(example.token_ids)), None)
        if row is None:
            misses += 1
            continue
        misses = 0
        rows[row].append(example)
        space[row] -= len(example.token_ids)
    return lay_out(rows, row_length)


def lay_out(rows: list[list[Encoded]], row_length: int) -> Batch:
    """Returns the batch whose row i holds the conversations `rows[i]`, which together must fit in `row_length`."""
    shape = (len(rows), row_length)
    batch = Batch(np.full(shape, PAD, np.int32), np.full(shape, -1, np.int32), *np.zeros((2, *shape), np.int32))
    for row, examples in enumerate(rows):
        start = 0
        for document, example in enumerate(examples, start=1):
            ids = np.asarray(example.token_ids, np.int32)
            end = start + len(ids)
            batch.token_ids[row, start:end] = ids
            batch.targets[row, start : end - 1] = np.where(example.trained[1:], ids[1:], -1)
            batch.positions[row, start:end] = np.arange(len(ids))
            batch.documents[row, start:end] = document
            start = end
    return batch
