"""The formats of one tokenizer, prepared for parsing replies."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from penstock.engine.errors import InvalidRequest
from penstock.engine.request import ResponseSpec
from penstock.engine.text.response.call_ids import call_id
from penstock.engine.text.response.formats import FORMATS
from penstock.engine.text.response.reading.dialect import Dialect, dialect
from penstock.engine.text.response.reading.modes import Modes, modes
from penstock.engine.text.response.reading.parser import ReplyParser

RULES = 2
"""Version of the rules by which replies are read, flaws included, and bound by grammars.

A change of what a reply says, or of what may follow in it, raises it.
"""


class ReplyFormats:
    """Prepares formats on first use. Only one thread at a time may use it."""

    def __init__(self, special_token_ids: Mapping[str, int]) -> None:
        self._special_token_ids = special_token_ids
        self._dialects: dict[str, Dialect] = {}
        self._modes: dict[tuple[str, bool, bool, bool], Modes] = {}

    def dialect(self, name: str) -> Dialect:
        """Returns the format's dialect. Raises InvalidRequest if there is no such format."""
        if name not in FORMATS:
            raise InvalidRequest(f"the format of a reply must be one of {', '.join(FORMATS)}, not {name!r}")
        if name not in self._dialects:
            self._dialects[name] = dialect(FORMATS[name], self._special_token_ids)
        return self._dialects[name]

    def parser(
        self, spec: ResponseSpec, request_id: str, choice: int, *, shows_special: bool = False, mends: bool = False
    ) -> ReplyParser:
        """Returns a parser for a new reply.

        Args:
            spec: how it is parsed.
            request_id: its request's.
            choice: its number among the replies to the request.
            shows_special: whether special tokens outside the syntax stay in its text.
            mends: whether calls with a known flaw count.
        """
        spoken = self.dialect(spec.format)
        flaws = frozenset(FORMATS[spec.format].known_flaws if mends else ())
        key = (spec.format, bool(spec.tools), spec.reads_reasoning, mends)
        if key not in self._modes:
            read = spoken.format if spec.reads_reasoning else spoken.format.without_reasoning()
            self._modes[key] = modes(read, has_tools=bool(spec.tools), flaws=flaws)
        name = partial(call_id, request_id, choice)
        return ReplyParser(spoken, self._modes[key], spec, name, shows_special=shows_special, flaws=flaws)
