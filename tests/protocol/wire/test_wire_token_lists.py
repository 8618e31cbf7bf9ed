from __future__ import annotations

import pytest

from penstock.protocol.wire.token_lists import read_tokens, spell_tokens


@pytest.mark.parametrize("count", [0, 1, 2, 4095, 4096, 4097, 10_000])
def test_token_ids_are_joined_by_commas_and_read_again(count: int) -> None:
    ids = tuple(range(count))
    text = spell_tokens(ids)
    assert text == ",".join(map(str, ids))
    assert read_tokens(text) == ids


@pytest.mark.parametrize("text", [",", "1,", ",1", "1,,2", "x", "-1", "+1", "1.0", " 1", "1_0", "٣", "1\n"])
def test_what_is_no_token_id_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a token id"):
        read_tokens(text)
    with pytest.raises(ValueError, match="is not a token id"):
        read_tokens("7," * 5000 + text)


def test_a_number_that_python_does_not_read_is_refused() -> None:
    with pytest.raises(ValueError, match="digits"):
        read_tokens("1" * 10_000)
