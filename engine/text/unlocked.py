"""Calls the Rust tokenizer in a way that lets other threads run meanwhile.

Its `encode` and `decode` hold the GIL until they are done: for a text of 1 MB that is seconds in which no stream of the
process continues. Its batch calls release the GIL, and work for a single text as well.
"""

from __future__ import annotations

from collections.abc import Sequence

import tokenizers


def token_ids(backend: tokenizers.Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
    """Encodes like `encode`, without the offsets, which nobody needs."""
    (encoding,) = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    ids: list[int] = encoding.ids
    return ids


def text_of(backend: tokenizers.Tokenizer, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
    """Decodes like `decode`."""
    (text,) = backend.decode_batch([ids], skip_special_tokens=skip_special_tokens)
    return str(text)
