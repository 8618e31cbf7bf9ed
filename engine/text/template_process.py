"""Renders a chat template: a sandbox program (`sandbox/child.py`), for `chat_template.py`.

A template is an untrusted program: jinja2's sandbox bounds `range`, but not nested loops, `'x' * 10**9`, or a slow
regular expression. The sandbox's setup is the template; a request holds the `variables` of one rendering and its
current time (`now_s`), or nothing: it then asks for the names of the template's variables, in JSON.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils

MAX_CHARS, MAX_CHARS_PER_BYTE = 2**20, 4  # of a rendering, plus this many per byte of the request
MAX_NOW_S = datetime(9999, 1, 1, tzinfo=UTC).timestamp()


class TooLong(Exception):
    """The template makes more text than the limit."""


class Generation(jinja2.ext.Extension):
    """The tag around an answer that marks what to train on; it is rendered as if it were not there."""

    tags = {"generation"}  # noqa: RUF012  as jinja2 declares it

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_render"), [], [], body).set_lineno(line)

    def _render(self, caller: Any) -> str:
        return str(caller())


class Namespace(jinja2.utils.Namespace):
    """A namespace without names that reach into Python."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # an attribute may be named `self`
        values = dict(*args[1:], **kwargs)
        for name in values:
            _check_name(name)
        jinja2.utils.Namespace.__init__(args[0], values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


class Dict:
    """`dict` for templates: not the type itself, whose attributes lead further."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


def environment() -> jinja2.Environment:
    """Returns the environment in which transformers renders chat templates.

    `tests/engine/text/test_text_chat_template.py` compares the two.
    """
    made = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    made.filters["tojson"] = _tojson
    made.globals |= {
        "raise_exception": _raise_exception, "dict": Dict(), "namespace": Namespace,
    }  # fmt: skip
    return made


def start(source: str) -> Callable[[Any, int], dict[str, str]]:
    """Compiles the template with its first rendering, within the same limits."""
    compiled = functools.cache(environment().from_string)

    def answer(given: Any, num_bytes: int) -> dict[str, str]:
        template = compiled(source)
        if not given:
            return {"text": json.dumps(sorted(jinja2.meta.find_undeclared_variables(environment().parse(source))))}
        variables = {"strftime_now": _clock(given["now_s"]), **given["variables"]}
        return {"text": _text(template, variables, MAX_CHARS + MAX_CHARS_PER_BYTE * num_bytes)}

    return lambda given, num_bytes: _outcome(lambda: answer(given, num_bytes))


def _outcome(answer: Callable[[], dict[str, str]]) -> dict[str, str]:
    try:
        return answer()
    except MemoryError:
        raise
    except TooLong as error:
        return {"failed": str(error)}
    except Exception as error:  # a template can raise anything
        if type(error) is jinja2.TemplateError:  # by `raise_exception`
            return {"refused": str(error)}
        return {"failed": f"{type(error).__name__}: {error}"}


def _text(template: jinja2.Template, variables: Mapping[str, Any], max_chars: int) -> str:
    """Renders like `Template.render`, but stops if the text gets too long."""
    pieces, num_chars = [], 0
    for piece in template.generate(variables):
        pieces.append(piece)
        num_chars += len(piece)
        if num_chars > max_chars:
            raise TooLong(f"it makes more than {max_chars} characters")
    return "".join(pieces)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace can have no attribute {name!r}")


def _raise_exception(message: Any) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Writes JSON for templates; Jinja's own filter escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _clock(now_s: float) -> Callable[[str], str]:
    """Returns a clock in UTC, so that all machines render the same; without a zone, as in transformers."""
    now = datetime.fromtimestamp(min(max(now_s, 0.0), MAX_NOW_S), UTC).replace(tzinfo=None)

    def strftime_now(format: str) -> str:  # noqa: A002  as templates call it
        return now.strftime(format)

    return strftime_now
