"""A tokenizer's tokens in the form that grammars need."""

from __future__ import annotations

from penstock.engine.structured import Vocabulary
from penstock.engine.text.tokenizer import Tokenizer


def vocabulary_of(tokenizer: Tokenizer, size: int, eos_token_ids: tuple[int, ...]) -> Vocabulary:
    """Returns the vocabulary of a model with `size` tokens; ids beyond that are never generated."""
    ends = tuple(id_ for id_ in eos_token_ids if id_ < size)
    names = {id_: name for name, id_ in tokenizer.special_token_ids.items() if id_ < size}
    names |= {id_: f"<eos {id_}>" for id_ in ends if id_ not in names}
    ids = (id_ for id_ in range(min(size, tokenizer.vocab_size)) if id_ not in names)
    spelled = ((id_, *tokenizer.spell(id_)) for id_ in ids)
    # Other ids of a special token, which a list of pieces may have, are not text in a reply either.
    token_bytes = {id_: data for id_, text, data in spelled if data and text not in tokenizer.special_token_ids}
    return Vocabulary(size, token_bytes, names, ends, tokenizer.encode_part)
