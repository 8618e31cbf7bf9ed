"""Rewords llguidance's errors about grammars that it refuses."""

from __future__ import annotations

import re

_NOT_VERBOSE = "<non-verbose/>"  # its mark for omitted details
_PLACE = re.compile(r"^(?:at )?(\d+)\((\d+)\): ")  # in the user's grammar, or in a generated one
_EXCERPT = re.compile(r"\n\s*\d+ \| .*", re.DOTALL)
_REFUSED = "the grammar can't be used: "
_OF_SCHEMAS = "failed to compile JSON schema: "
_NOTHING = "nothing can follow it"

_WORDS: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern, re.DOTALL), words)
    for pattern, words in (
        (_NOTHING, _NOTHING),
        (r"Unsatisfiable schema: (.*)", rf"{_NOTHING}: \1"),
        (r"Unimplemented keys: \[(.*)\]", r"\1 is not supported"),
        (r"Unknown format: (.*)", r"the format '\1' is not supported"),
        (r"oneOf constraints are not supported.*", "oneOf is not supported where its branches may overlap"),
        (r"Resource '(?:json-schema:///)?(.*?)' is not present.*", r"'\1' is another document, which is not retrieved"),
        (r"Pointer '(.*)' does not exist", r"the reference '#\1' leads nowhere"),
        (r"Value for 'multipleOf' has too many digits.*", "multipleOf has too many digits"),
        (r"patternProperty regexes (.*) and (.*) are not disjoint", r"patternProperties may overlap: \1 and \2"),
        (r"Expected (?:f64|.*?) for '(.*?)', got (.*)", r"\1 can't be \2"),
        (r"Failed to generate regex for (?:integer|float) range: .*", "its bounds have too many digits"),
        (r".*unexpected end of hex escape.*", "it has half of a character (a lone surrogate)"),
        (r"(?:invalid regex \".*\" \(in regex\): )?regex parse error:\n(.*)\nerror: (.*)", r"a pattern: \2, in\n\1"),
        (r"(unknown special token: .*?);.*", r"\1"),
        (r"(Unknown common regex: .*?);.*", r"\1"),
    )
)


def refusal(message: str) -> str:
    said = _EXCERPT.sub("", cleaned(message))
    what = _PLACE.sub("", said)
    for pattern, words in _WORDS:
        match = pattern.fullmatch(what.removeprefix(_OF_SCHEMAS))
        if match is not None:
            return f"{_REFUSED}{match.expand(words)}"
    if what.startswith(_OF_SCHEMAS):
        return _REFUSED + what.removeprefix(_OF_SCHEMAS)
    return _REFUSED + _PLACE.sub(r"line \1, column \2: ", said)


def cleaned(message: str) -> str:
    """Returns llguidance's message without its mark for omitted details."""
    return message.removesuffix(_NOT_VERBOSE).strip().replace("NoExtensionBias", _NOTHING)
