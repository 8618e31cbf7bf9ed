"""The chat templates that tests have, and what is read of the replies to them."""

from __future__ import annotations

import functools
import re

from penstock.engine.text.bridges.round_trip import Readback
from penstock.engine.text.conversation import ConversationTemplate
from penstock.engine.text.response.formats import FORMATS
from tests.support.packages import ROOT

_FOLDER = ROOT / "tests/chat_templates"
_FAMILY = re.compile(r"{#- ([^:]+):")
TEMPLATES = {
    path.stem: path.read_text() for path in sorted([*_FOLDER.glob("*.jinja"), *_FOLDER.glob("written/*.jinja")])
}


def family_of(name: str) -> str:
    """Returns the models that a template is like, which its first line names."""
    found = _FAMILY.match(TEMPLATES[name])
    assert found is not None
    return found[1]


def read_back(source: str, special: tuple[str, ...] = (), setting: str | None = None) -> Readback:
    return ConversationTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}).read_back(special, setting)


@functools.cache
def readback_of(name: str, *, special: bool = False) -> Readback:
    """Returns what is read of a template, with the tags as text or, if a format was found by them, as tokens."""
    if not special:
        return read_back(TEMPLATES[name])
    format_ = readback_of(name).format
    assert format_ is not None
    return read_back(TEMPLATES[name], FORMATS[format_].delimiters)
