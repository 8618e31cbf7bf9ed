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

from penstock.producer import keys


@dataclass(frozen=True, slots=True)
class Package:
    """One of the four packages, with its folders and their purposes."""

    name: str
    title: str
    folders: tuple[tuple[str, str], ...]


PRODUCER = Package(
    "producer", "the client library",
    (
        ("blocking", "the client for threads"),
        ("reading", "all replies over one connection"),
        ("operations", "what operators see and do"),
        ("serving", "what two servers share"),
        ("redis", "how Redis is reached"),
        ("telemetry", "spans, where asked for"),
        ("wire", "what travels: the schema"),
    ),
)  # fmt: skip
GATEWAY = Package(
    "gateway", "HTTP, for any client of these APIs",
    (
        ("openai", "chats, completions, models"),
        ("responses", "answers that are kept"),
        ("anthropic", "messages"),
        ("files", "uploads"),
        ("batches", "files of requests, under leases"),
        ("operations", "the operators' routes"),
        ("page", "the pages for browsers"),
        ("generation", "starts a request, or joins it"),
        ("abandonment", "ends what nobody reads"),
        ("admission", "who asks, and how much it may"),
        ("keys", "API keys and their limits"),
        ("store", "its own keys in Redis"),
        ("http", "bounds, streams, errors"),
    ),
)  # fmt: skip
ENGINE = Package(
    "engine", "tokens in, tokens and text out",
    (
        ("scheduling", "plans steps, in plain Python"),
        ("execution", "runs a step on the device"),
        ("attention", "over pages of keys and values"),
        ("models", "families, over shared layers"),
        ("formats", "how weights are stored and held"),
        ("kernels", "Pallas, for TPU and GPU"),
        ("native", "C++, for CPUs"),
        ("speculation", "guesses what comes next"),
        ("text", "tokens into text and tool calls"),
        ("structured", "grammars"),
        ("loading", "safetensors and GGUF"),
        ("planning", "which slice of TPUs would do"),
        ("sandbox", "ends untrusted programs"),
        ("demo", "the small model"),
    ),
)  # fmt: skip
WORKER = Package(
    "worker", "between Redis and the engine",
    (
        ("delivery", "a request in, its tokens out"),
        ("protocol", "scripts, heartbeats, takeover"),
        ("calls", "answers without generating"),
        ("health", "probes and metrics"),
        ("cli", "the command penstock"),
        ("local", "what runs on one machine"),
        ("bench", "measures a queue"),
        ("chaos", "tries to break it"),
    ),
)  # fmt: skip
PACKAGES = (GATEWAY, PRODUCER, ENGINE, WORKER)

IMPORTS = (("gateway", "producer"), ("worker", "producer"), ("worker", "engine"))
"""Imports between packages that are generally allowed."""

EXCEPTIONS = (("worker", "gateway"),)
"""Imports that are allowed only from the modules that a contract names."""

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
ROW, HEAD = 19, 46
NAME_COLUMN = 98
FIRST_Y = 44
BETWEEN = 40
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
  .import { stroke: var(--import); stroke-width: 1.4; fill: none; } .import-text { fill: var(--import); }
  .some { stroke-dasharray: 2 4; } .flow-head { fill: var(--flow); } .import-head { fill: var(--import); }
"""


def box_height(package: Package) -> int:
    return HEAD + ROW * len(package.folders) + 8


@dataclass(frozen=True, slots=True)
class Place:
    """Position of a package's box."""

    x: int
    y: int
    width: int
    height: int


def places() -> dict[str, Place]:
    """Returns positions: clients on the left, a worker on the right; an importing package is above or below the
    imported one.
    """
    height = max(sum(map(box_height, pair)) for pair in ((GATEWAY, PRODUCER), (ENGINE, WORKER))) + BETWEEN
    found: dict[str, Place] = {}
    for x, upper, lower in ((MARGIN, GATEWAY, PRODUCER), (RIGHT_X, ENGINE, WORKER)):
        width = SIDE - 2 * PAD
        found[upper.name] = Place(x + PAD, FIRST_Y + PAD, width, box_height(upper))
        found[lower.name] = Place(x + PAD, FIRST_Y + PAD + height - box_height(lower), width, box_height(lower))
    return found


def drawing() -> str:
    """Returns the SVG."""
    where = places()
    bottom = max(place.y + place.height for place in where.values()) + PAD
    height = bottom + 62
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img"',
        f"aria-label={quoteattr(told())}>",
        f"<style>{STYLE}</style>",
        f'<rect class="paper" width="{WIDTH}" height="{height}" rx="10"/>',
    ]
    for x, title in ((MARGIN, "clients"), (RIGHT_X, "each worker, of any number")):
        parts.append(_rect("outer", x, FIRST_Y, SIDE, bottom - FIRST_Y))
        parts.append(_text(title, x + SIDE / 2, FIRST_Y - 12, "group", "middle"))
    for package in PACKAGES:
        parts += _package(package, where[package.name])
    parts += _redis(bottom)
    parts += _imports(where, bottom)
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


def told() -> str:
    """Returns the picture in words, for readers who can't see it."""
    imports = ", ".join(f"{source} imports {target}" for source, target in IMPORTS)
    return f"Clients and workers meet in Redis. {imports[0].upper()}{imports[1:]}; engine and producer import neither."


def _package(package: Package, place: Place) -> Iterator[str]:
    yield _rect("box", place.x, place.y, place.width, place.height)
    yield _text(f"{package.name}/", place.x + 12, place.y + 22, "title")
    yield _text(package.title, place.x + 12, place.y + 39, "faint")
    for row, (folder, what) in enumerate(package.folders):
        y = place.y + HEAD + ROW * row + 15
        yield _text(f"{folder}/", place.x + 12, y, "mono")
        yield _text(what, place.x + 12 + NAME_COLUMN, y, "faint")


def _redis(bottom: int) -> Iterator[str]:
    first = FIRST_Y + 62
    yield _rect("redis", REDIS_X, FIRST_Y, REDIS_WIDTH, bottom - FIRST_Y)
    yield _text("Redis, or Valkey", REDIS_X + REDIS_WIDTH / 2, FIRST_Y + 26, "title", "middle")
    yield _text("one server, Sentinel or Cluster", REDIS_X + REDIS_WIDTH / 2, FIRST_Y + 44, "faint", "middle")
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


def _imports(where: dict[str, Place], bottom: int) -> Iterator[str]:
    gateway, producer, engine, worker = (where[name] for name in ("gateway", "producer", "engine", "worker"))
    for source, target in ((gateway, producer), (worker, engine)):
        x = source.x + source.width / 2
        begin, end = (
            (source.y + source.height, target.y) if source.y < target.y else (source.y, target.y + target.height)
        )
        yield _line("import", x, begin, x, end)
        yield _text("imports", x + 8, (begin + end) / 2 + 4, "import-text")
    lower = producer.y + producer.height
    x, to, y = worker.x + worker.width / 2, producer.x + producer.width / 2, bottom + 18
    yield _path("import", f"M{x} {lower}V{y}H{to}V{lower + 2}")
    yield _text("imports", WIDTH / 2, y - 5, "import-text", "middle")
    x, to, y = x + 30, producer.x - 8, bottom + 42
    yield _path("import some", f"M{x} {lower}V{y}H{to - 10}V{gateway.y + 40}H{gateway.x - 1}")
    yield _text(
        "a few modules: the commands, settings, bounds and metrics of HTTP", WIDTH / 2, y - 5, "import-text", "middle"
    )


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
