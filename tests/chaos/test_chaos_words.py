"""The fake engine's text follows from its tokens, whatever was said before a takeover."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.text.response.call_ids import call_id
from penstock.tools.chaos.fake_words import CALL, Said, everything_said, speech_of, word

tokens = st.lists(st.integers(0, 4095) | st.sampled_from([7, 14, 21]), max_size=60)
PROMPT = (CALL + "x").encode()


@given(tokens, st.integers(0, 60), st.booleans(), st.sampled_from([PROMPT, b"x"]))
def test_after_a_takeover_the_rest_is_said(tokens: list[int], place: int, holds_back: bool, prompt: bytes) -> None:
    whole = everything_said(speech_of(prompt, "r", 0, holds_back=holds_back), tokens)
    first, heir = (speech_of(prompt, "r", 0, holds_back=holds_back) for _ in range(2))
    said = Said()
    for token in tokens[:place]:
        said = said.then(first.push(token))
        heir.push(token)
    assert said.then(everything_said(heir, tokens[place:])) == whole


@given(tokens)
def test_calls_are_json_once_they_are_whole_and_words_are_somewhere(tokens: list[int]) -> None:
    said = everything_said(speech := speech_of(PROMPT, "r", 1, holds_back=True), tokens)
    begun = [delta for delta in said.tool_calls if delta.id is not None]
    assert [delta.index for delta in begun] == list(range(len(begun)))
    assert [delta.id for delta in begun] == [call_id("r", 1, place) for place in range(len(begun))]
    calls = ["".join(delta.arguments for delta in said.tool_calls if delta.index == at) for at in range(len(begun))]
    whole = [arguments for arguments in calls if arguments.endswith('"}')]
    assert speech.has_called == bool(whole)
    assert all(set(json.loads(arguments)) == {"words"} for arguments in whole)
    assert len(calls) - len(whole) <= 1
    spoken = [word(token) for token in tokens if token % 7]
    assert sum(map(len, spoken)) + sum(len('{"words":"') for _ in calls) + 2 * len(whole) == sum(
        map(len, (said.text, said.reasoning, *calls))
    )


def test_only_such_prompts_get_calls() -> None:
    assert everything_said(speech_of(b"Cal", "r", 0, holds_back=False), [1, 7, 14]).text == word(1) + word(7) + word(14)
    assert everything_said(speech_of(PROMPT, "r", 0, holds_back=False), [1, 7, 2]) == Said(word(2), word(1))
