"""Renders a chat template: a process of its own, which `chat_template.py` starts by this file's path.

A template is a program from a stranger, and nothing inside a process ends one for certain: jinja2's sandbox bounds
`range`, but not loops within loops, `'x' * 10**9`, or a regular expression at work. Here the kernel counts. It ends the
process when a rendering has used up its time, and refuses memory beyond a bound.

This file is a script: it imports nothing of Penstock, and what it imports is there within a twentieth of a second.
Frames are a length in 8 bytes and JSON, both ways over the socket that is the standard input. The first holds the
template, each further one the `variables` of one rendering and what it takes for the present (`now_s`); the answer is
`{"text": ...}`, `{"refused": ...}` or `{"failed": ...}`. The end of the input ends the process.
"""

from __future__ import annotations

import contextlib
import functools
import json
import resource
import signal
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, BinaryIO

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils

# A rendering may use so much of everything, and as many times the size of what it is given.
CPU_S = 2.0
MAX_CHARS, MAX_CHARS_PER_BYTE = 2**20, 4
MAX_BYTES, MAX_BYTES_PER_BYTE = 2**28, 16
MAX_IDLE_BYTES = 2**27  # a process that has grown above this ends; the next one starts small
MAX_MESSAGE_CHARS = 500
MAX_NOW_S = datetime(9999, 1, 1, tzinfo=UTC).timestamp()


class TooLong(Exception):
    """The template makes more text than the limit."""


class Generation(jinja2.ext.Extension):
    """The tag around an answer, which marks what to train on: rendered as if it was not there."""

    tags = {"generation"}  # noqa: RUF012  as jinja2 declares it

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_render"), [], [], body).set_lineno(line)

    def _render(self, caller: Any) -> str:
        return str(caller())


class Namespace(jinja2.utils.Namespace):
    """Without names that reach into Python."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # `self` may be an attribute's name
        values = dict(*args[1:], **kwargs)
        for name in values:
            _check_name(name)
        jinja2.utils.Namespace.__init__(args[0], values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


class Dict:
    """`dict` as a template may use it: not the type itself, whose attributes lead on."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


def environment() -> jinja2.Environment:
    """What transformers renders chat templates in; `tests/engine/test_text_chat_template.py` holds it to that."""
    made = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    made.filters["tojson"] = _tojson
    made.globals |= {
        "raise_exception": _raise_exception, "dict": Dict(), "namespace": Namespace,
    }  # fmt: skip
    return made


def main() -> None:
    for number in (signal.SIGPIPE, signal.SIGPROF):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # the starting thread's is inherited
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:  # noqa: PTH123  an import less
        file.write("1000")  # where memory runs out, this process goes, not the worker
    with open(0, "rb") as requests, open(0, "wb", closefd=False) as answers:
        compiled = functools.cache(environment().from_string)
        source = json.loads(_frame(requests) or b'""')
        while request := _frame(requests):
            answer = _answer(lambda: compiled(source), request)
            answers.write(len(answer).to_bytes(8) + answer)
            answers.flush()


def _answer(template: Callable[[], jinja2.Template], request: bytes) -> bytes:
    max_bytes = MAX_BYTES + MAX_BYTES_PER_BYTE * len(request)
    resource.setrlimit(resource.RLIMIT_AS, (max_bytes, resource.RLIM_INFINITY))
    signal.setitimer(signal.ITIMER_PROF, CPU_S)  # then SIGPROF, which ends the process
    try:
        return _encoded(_outcome(template, request))
    except MemoryError:
        pass  # the exception releases what holds the memory
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return _encoded({"failed": f"it needs more than {max_bytes >> 20} MiB of memory"})


def _outcome(template: Callable[[], jinja2.Template], request: bytes) -> dict[str, str]:
    try:
        given = json.loads(request)
        variables = {"strftime_now": _clock(given["now_s"]), **given["variables"]}
        return {"text": _text(template(), variables, MAX_CHARS + MAX_CHARS_PER_BYTE * len(request))}
    except MemoryError:
        raise
    except TooLong as error:
        return {"failed": str(error)}
    except Exception as error:  # a template can raise anything
        if type(error) is jinja2.TemplateError:  # by `raise_exception`
            return {"refused": str(error)}
        return {"failed": f"{type(error).__name__}: {error}"}


def _text(template: jinja2.Template, variables: Mapping[str, Any], max_chars: int) -> str:
    """As `Template.render`, but that it stops at a text that is too long."""
    pieces, num_chars = [], 0
    for piece in template.generate(variables):
        pieces.append(piece)
        num_chars += len(piece)
        if num_chars > max_chars:
            raise TooLong(f"it makes more than {max_chars} characters")
    return "".join(pieces)


def _encoded(outcome: dict[str, str]) -> bytes:
    shortened = {kind: text if kind == "text" else text[:MAX_MESSAGE_CHARS] for kind, text in outcome.items()}
    answer = {**shortened, "is_last": _held_bytes() > MAX_IDLE_BYTES}
    return json.dumps(answer, ensure_ascii=False).encode(errors="surrogatepass")


def _held_bytes() -> int:
    """Address space. Not `ru_maxrss`, which begins with that of the process that started this one."""
    try:
        with open("/proc/self/statm") as file:  # noqa: PTH123  an import less
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:  # no Linux
        return 0


def _frame(stream: BinaryIO) -> bytes:
    """What came whole; empty at the end of the input."""
    return stream.read(int.from_bytes(stream.read(8)))


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace can have no attribute {name!r}")


def _raise_exception(message: Any) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Jinja's own escapes what is HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _clock(now_s: float) -> Callable[[str], str]:
    """In UTC, so that all machines render the same; without a zone, as the one of transformers."""
    now = datetime.fromtimestamp(min(max(now_s, 0.0), MAX_NOW_S), UTC).replace(tzinfo=None)

    def strftime_now(format: str) -> str:  # noqa: A002  as templates call it
        return now.strftime(format)

    return strftime_now


if __name__ == "__main__":
    main()
