"""Draws docs/architecture.svg: the packages and their folders, their imports, and the Redis keys between them.

    python -m docs.scripts.architecture > docs/architecture.svg

The content is declared here, and `tests/docs/test_architecture_drawing.py` compares it with the folders, the modules'
imports and the contracts in pyproject.toml. The picture has its own background, light or dark like the reader's, so
that it fits on any page.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal
from xml.sax.saxutils import escape, quoteattr

from penstock.protocol import keys


@dataclass(frozen=True, slots=True)
class Package:
    """One of the packages: what it imports of the others, its folders and their purposes."""

    name: str
    title: str
    imports: tuple[str, ...]
    folders: tuple[tuple[str, str], ...]


CLI = Package(
    "cli", "the command penstock: a file a command",
    ("tools", "local", "gateway", "worker", "producer", "serving", "engine", "protocol"),
    (
        ("bench", "what penstock bench measures"),
        ("checks", "what penstock doctor looks at"),
        ("watching", "the screen of penstock top"),
        ("chatting", "the parts of penstock chat"),
        ("shared", "options, exit statuses"),
    ),
)  # fmt: skip
TOOLS = Package(
    "tools", "what nobody who serves has to load",
    ("local", "worker", "producer", "engine", "protocol"),
    (
        ("bench", "measures a queue or an engine"),
        ("chaos", "tries to break a fleet"),
        ("map", "a file of prompts to a file of replies"),
        ("plan", "which slice of TPUs would do"),
    ),
)  # fmt: skip
LOCAL = Package(
    "local", "all of it on one machine: LLM, demos",
    ("worker", "producer", "engine", "protocol"),
    (),
)  # fmt: skip
GATEWAY = Package(
    "gateway", "HTTP, for any client of these APIs",
    ("producer", "serving", "protocol"),
    (
        ("openai", "chats, completions, models"),
        ("responses", "answers that are kept"),
        ("anthropic", "messages"),
        ("common", "what these three share"),
        ("files", "uploads"),
        ("batches", "files of requests, under leases"),
        ("operations", "the operators' routes"),
        ("page", "the pages for browsers"),
        ("openapi", "the API, described"),
        ("generation", "starts a request, or joins it"),
        ("abandonment", "ends what nobody reads"),
        ("admission", "who asks, and how much it may"),
        ("keys", "API keys and their limits"),
        ("store", "its own keys in Redis"),
        ("http", "bodies, streams, errors"),
    ),
)  # fmt: skip
WORKER = Package(
    "worker", "delivery, between Redis and the engine",
    ("engine", "serving", "protocol"),
    (
        ("intake", "from the queue to the engine"),
        ("run", "a request while it runs"),
        ("publish", "its tokens, and its end"),
        ("watch", "cancels, accounts, reports"),
        ("calls", "answers without generating"),
        ("presence", "its name and heartbeat"),
        ("redis", "retries, fences, permissions"),
        ("health", "probes and metrics"),
    ),
)  # fmt: skip
PRODUCER = Package(
    "producer", "the client library",
    ("protocol",),
    (
        ("blocking", "the client for threads"),
        ("reading", "all replies over one connection"),
    ),
)  # fmt: skip
ENGINE = Package(
    "engine", "tokens in, tokens and text out",
    (),
    (
        ("scheduling", "plans steps, in plain Python"),
        ("execution", "runs a step on the device"),
        ("attention", "over pages of keys and values"),
        ("models", "families, over shared layers"),
        ("sharding", "over several devices"),
        ("deployment", "what a checkpoint becomes here"),
        ("formats", "how weights are stored and held"),
        ("kernels", "for TPUs (Pallas), for CPUs (C++)"),
        ("speculation", "guesses what comes next"),
        ("text", "tokens into text and tool calls"),
        ("structured", "grammars"),
        ("loading", "safetensors and GGUF"),
        ("sandbox", "ends untrusted programs"),
        ("demo", "the small model"),
    ),
)  # fmt: skip
SERVING = Package(
    "serving", "what both servers need",
    ("protocol",),
    (("http", "the guard of a port"),),
)  # fmt: skip
PROTOCOL = Package(
    "protocol", "what all sides agree on in Redis",
    (),
    (
        ("wire", "the schema of what travels"),
        ("redis", "how Redis is reached"),
        ("queue", "what clients do to a queue"),
        ("scripts", "what workers do to it, in Lua"),
        ("operations", "what operators see and do"),
        ("telemetry", "spans, where asked for"),
    ),
)  # fmt: skip
PACKAGES = (CLI, TOOLS, LOCAL, GATEWAY, WORKER, PRODUCER, ENGINE, SERVING, PROTOCOL)

Arrow = Literal["in", "out"]


@dataclass(frozen=True, slots=True)
class Key:
    """A kind of key, and how clients and workers use it. `out` is away from Redis."""

    name: str
    what: str
    client: tuple[Arrow, str] | None
    worker: tuple[Arrow, str] | None


KEYS = (
    Key(keys.requests("QUEUE"), "stream: what waits and runs", ("in", "XADD"), ("out", "take, ack")),
    Key(keys.reply("QUEUE", "ID"), "stream: own, chunks, end", ("out", "XREAD"), ("in", "XADD")),
    Key(keys.cancel("QUEUE", "ID"), "a flag", ("in", "SET"), ("out", "EXISTS")),
    Key(keys.calls("QUEUE"), "stream: count_tokens and the like", ("in", "XADD"), ("out", "take")),
    Key(keys.answers("QUEUE", "ID"), "stream: their answers", ("out", "XREAD"), ("in", "XADD")),
    Key(keys.card("QUEUE"), "hash: what is served", ("out", "HGETALL"), ("in", "HSET")),
    Key(keys.report("QUEUE", "NAME"), "for operators: what a worker does", ("out", "GET"), ("in", "SET")),
)

WIDTH, MARGIN = 1180, 14
SIDE, GAP, PAD = 362, 88, 10
ROW, HEAD = 19, 64
NAME_COLUMN = 98
TOP_Y = 14
BETWEEN = 14
KEY_ROW = 60
SANS_WIDTH, MONO_WIDTH = 6.7, 7.4  # of a character at 13 and 12 pixels, at most
REDIS_X = MARGIN + SIDE + GAP
REDIS_WIDTH = WIDTH - 2 * REDIS_X
RIGHT_X = WIDTH - MARGIN - SIDE

STYLE = """
  svg { --paper: #ffffff; --ink: #1c2733; --faint: #5b6875; --box: #f3f6f9; --line: #a9b4bf; --redis: #fdf0ec;
    --redis-line: #c8452b; --flow: #0b6e99; --import: #6b4fa0; }
  @media (prefers-color-scheme: dark) { svg { --paper: #12181f; --ink: #e8edf2; --faint: #a3afbb; --box: #1c252f;
    --line: #4d5a67; --redis: #35211d; --redis-line: #f08a72; --flow: #62bfe8; --import: #b9a2ea; } }
  text { font: 13px system-ui, "Segoe UI", Helvetica, Arial, sans-serif; fill: var(--ink); }
  .mono { font: 12px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
  .title { font-weight: 600; font-size: 16px; } .faint { fill: var(--faint); } .group { font-weight: 600; }
  .paper { fill: var(--paper); } .box { fill: var(--box); stroke: var(--line); }
  .outer { fill: none; stroke: var(--line); stroke-dasharray: 5 4; }
  .redis { fill: var(--redis); stroke: var(--redis-line); }
  .flow { stroke: var(--flow); stroke-width: 1.6; fill: none; } .flow-text { fill: var(--flow); }
  .flow-head { fill: var(--flow); } .import-text { fill: var(--import); }
"""


def box_height(package: Package) -> int:
    return HEAD + ROW * len(package.folders) + 8


def imports_of(package: Package) -> str:
    """Returns what a package imports, in words."""
    if len(package.imports) == len(PACKAGES) - 1:
        return "imports all others"
    return "imports " + (", ".join(package.imports) or "no other")


@dataclass(frozen=True, slots=True)
class Place:
    """Position of a package's box."""

    x: int
    y: int
    width: int
    height: int


def places() -> dict[str, Place]:
    """Returns positions. A package imports those below it, from the command line at the top to the protocol."""
    found: dict[str, Place] = {}
    y = _floor(found, TOP_Y, (CLI, TOOLS, LOCAL))
    width, first = SIDE - 2 * PAD, y + 30 + PAD
    ends = []
    for x, upper, lower in ((MARGIN, GATEWAY, PRODUCER), (RIGHT_X, WORKER, ENGINE)):
        found[upper.name] = Place(x + PAD, first, width, box_height(upper))
        below = first + box_height(upper) + BETWEEN
        found[lower.name] = Place(x + PAD, below, width, box_height(lower))
        ends.append(below + box_height(lower))
    _floor(found, max(ends) + PAD + BETWEEN, (SERVING, PROTOCOL))
    return found


def _floor(found: dict[str, Place], y: int, packages: Sequence[Package]) -> int:
    """Puts packages side by side over the whole width; returns what is below them."""
    width = (WIDTH - 2 * MARGIN - BETWEEN * (len(packages) - 1)) // len(packages)
    height = max(map(box_height, packages))
    for number, package in enumerate(packages):
        found[package.name] = Place(MARGIN + number * (width + BETWEEN), y, width, height)
    return y + height


def drawing() -> str:
    """Returns the SVG."""
    where = places()
    top = where[GATEWAY.name].y - PAD
    bottom = where[SERVING.name].y - BETWEEN
    height = where[PROTOCOL.name].y + where[PROTOCOL.name].height + MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img"',
        f"aria-label={quoteattr(told())}>",
        f"<style>{STYLE}</style>",
        f'<rect class="paper" width="{WIDTH}" height="{height}" rx="10"/>',
    ]
    for x, title in ((MARGIN, "clients"), (RIGHT_X, "each worker, of any number")):
        parts.append(_rect("outer", x, top, SIDE, bottom - top))
        parts.append(_text(title, x + SIDE / 2, top - 10, "group", "middle"))
    for package in PACKAGES:
        parts += _package(package, where[package.name])
    parts += _redis(top, bottom)
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


def told() -> str:
    """Returns the picture in words, for readers who can't see it."""
    imports = "; ".join(f"{package.name} {imports_of(package)}" for package in PACKAGES)
    return f"Clients and workers meet in Redis. Of the packages, {imports}."


def _package(package: Package, place: Place) -> Iterator[str]:
    yield _rect("box", place.x, place.y, place.width, place.height)
    yield _text(f"{package.name}/", place.x + 12, place.y + 22, "title")
    yield _text(package.title, place.x + 12, place.y + 39, "faint")
    yield _text(imports_of(package), place.x + 12, place.y + 57, "import-text")
    for row, (folder, what) in enumerate(package.folders):
        y = place.y + HEAD + ROW * row + 15
        yield _text(f"{folder}/", place.x + 12, y, "mono")
        yield _text(what, place.x + 12 + NAME_COLUMN, y, "faint")


def _redis(top: int, bottom: int) -> Iterator[str]:
    first = top + 62
    yield _rect("redis", REDIS_X, top, REDIS_WIDTH, bottom - top)
    yield _text("Redis, or Valkey", REDIS_X + REDIS_WIDTH / 2, top + 26, "title", "middle")
    yield _text("one server, Sentinel or Cluster", REDIS_X + REDIS_WIDTH / 2, top + 44, "faint", "middle")
    for row, key in enumerate(KEYS):
        y = first + KEY_ROW * row + 26
        yield _text(key.name, REDIS_X + 12, y - 4, "mono")
        yield _text(key.what, REDIS_X + 12, y + 14, "faint")
        for touch, outside, inside in (
            (key.client, MARGIN + SIDE, REDIS_X),
            (key.worker, RIGHT_X, REDIS_X + REDIS_WIDTH),
        ):
            if touch is not None:
                begin, end = (outside, inside) if touch[0] == "in" else (inside, outside)
                yield _line("flow", begin, y + 2, end, y + 2)
                yield _text(touch[1], (outside + inside) / 2, y - 5, "flow-text", "middle")
    y = first + KEY_ROW * len(KEYS) + 22
    for line in ("lanes, heartbeats, dead letters and", "the gateway's store are beside these"):
        yield _text(line, REDIS_X + REDIS_WIDTH / 2, y, "faint", "middle")
        y += 18


def _rect(kind: str, x: float, y: float, width: float, height: float) -> str:
    return f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="7"/>'


def _text(words: str, x: float, y: float, kind: str, anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(words)}</text>'


def _line(kind: str, x: float, y: float, to_x: float, to_y: float) -> str:
    return _path(kind, f"M{x:g} {y:g}L{to_x:g} {to_y:g}")


def _path(kind: str, way: str) -> str:
    """Returns a path with an arrowhead at its end."""
    points = _points(way)
    (before_x, before_y), (x, y) = points[-2:]
    across, along = (before_y != y) * 4.5, (before_x != x) * 4.5
    back_x = x + 9 * ((before_x > x) - (before_x < x))
    back_y = y + 9 * ((before_y > y) - (before_y < y))
    head = f"M{x:g} {y:g}L{back_x - across:g} {back_y - along:g}L{back_x + across:g} {back_y + along:g}Z"
    return f'<path class="{kind}" d="{way}"/><path class="{kind.split()[0]}-head" d="{head}"/>'


def _points(way: str) -> Sequence[tuple[float, float]]:
    """Returns the corners of a path of M, L, H and V."""
    points: list[tuple[float, float]] = []
    for step in way.replace("M", "|M").replace("L", "|L").replace("H", "|H").replace("V", "|V").split("|")[1:]:
        values = [float(value) for value in step[1:].split()]
        last = points[-1] if points else (0.0, 0.0)
        points.append({"H": (values[0], last[1]), "V": (last[0], values[0])}.get(step[0], (values[0], values[-1])))
    return points


if __name__ == "__main__":
    sys.stdout.write(drawing())
