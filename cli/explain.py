"""`penstock explain`: what became of one request, in sentences. Needs the light client only."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.cli.shared.errors import USAGE, CommandFailed
from penstock.cli.shared.options import takes_settings
from penstock.cli.shared.redis import connected, visible
from penstock.cli.watching.view import duration
from penstock.protocol import keys
from penstock.protocol.operations.requests import RequestView, look_up
from penstock.protocol.redis.streams import read_newest
from penstock.protocol.wire import ID_PATTERN
from penstock.worker.settings import Settings

_TIMES = {
    "queued_ms": "waited until a worker took it", "ttft_ms": "had passed at its first token", "total_ms": "at its end",
}  # fmt: skip
_ENDS = {
    "stop": "the model ended it", "length": "it reached max_tokens, or the model's longest context",
    "tool_calls": "the model called a tool", "cancelled": "somebody cancelled it",
    "expired": "its time (timeout_s) was over", "error": "it failed",
}  # fmt: skip


@takes_settings(["redis_url", "queue"])
def explain(
    *,
    settings: Settings,
    request_id: Annotated[str, typer.Argument(help="Id of a request.", metavar="ID")],
    logs: Annotated[
        Path | None, typer.Option(help="Folder with JSON logs of workers and gateways, to take its lines from.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Explain what became of a request: where it waited, who had it, who took it over, why it ended.

    It reads the request's state, the order in which workers claimed it and, with --logs, what they logged of it. Its
    text is not shown.

    Exit status: 0 something is known of it, 1 nothing is.
    """
    if not ID_PATTERN.fullmatch(request_id):
        raise CommandFailed(f"{request_id!r} is not the ID of a request: {ID_PATTERN.pattern}", USAGE)
    if logs is not None and not _is_folder(logs):
        raise CommandFailed(f"--logs: {logs} is not a folder", USAGE)
    view, newest = asyncio.run(_look(settings, request_id))
    said = [] if view.state == "unknown" else list(_sentences(view, newest))
    lines = [] if logs is None else sorted(_logged(logs, request_id), key=lambda line: str(line.get("timestamp")))
    if as_json:
        typer.echo(json.dumps({"id": request_id, "state": view.state, "explanation": said, "log": lines}))
    else:
        for text in (*said, *map(_shown, lines)):
            typer.echo(visible(text))
    if not said and not lines:
        raise CommandFailed(f"queue {settings.queue!r} knows of no request {request_id!r}")


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # such as a name that is too long
        return False


async def _look(settings: Settings, request_id: str) -> tuple[RequestView, Mapping[bytes, bytes]]:
    """Returns the request's state, and the fields of its reply's newest entry, if there is one."""
    async with connected(settings.redis_url) as redis:
        view = await look_up(redis, settings.queue, request_id)
        newest = await read_newest(redis, keys.reply(settings.queue, request_id))
    return view, {} if newest is None else newest[1]


def _sentences(view: RequestView, newest: Mapping[bytes, bytes]) -> Iterator[str]:
    age = "" if view.age_s is None else f", sent {duration(view.age_s)} ago"
    yield f"It is {view.state}{age}." if view.state != "ended" else f"It has ended{age}."
    if view.state == "waiting":
        yield "No worker has taken it yet: `penstock workers` shows who serves the queue, and the backlog."
    if view.state == "lost":
        yield f"Its worker {view.worker} is gone; another one takes it over within seconds."
    for number, (epoch, worker) in enumerate(view.claims):
        yield f"{'Taken' if number == 0 else 'Taken over'} by {worker} (epoch {epoch})."
    if view.crashes:
        yield f"Workers that died while they had it: {view.crashes}."
    if view.handbacks:
        yield f"Workers that gave it back, to drain or for others of a higher priority: {view.handbacks}."
    for name, meaning in _TIMES.items():
        if (value := _number(newest, name)) is not None:
            yield f"{duration(value / 1000)} {meaning}."
    if (done := _number(newest, "prefill_done")) is not None:
        yield f"Its prompt is being computed: {done:,} of {_number(newest, 'prefill_total') or done:,} tokens."
    if view.tokens is not None:
        yield f"Tokens: {view.prompt_tokens or 0:,} of the prompt, {view.tokens:,} generated."
    if view.finish_reason is not None:
        code = "" if view.code is None else f": {view.code} (docs/wire.md lists the codes)"
        yield f"{view.finish_reason}: {_ENDS.get(view.finish_reason, 'of another version')}{code}."
    elif view.state == "ended":
        yield "Its reply is gone: replies are kept for a time after their end."


def _number(fields: Mapping[bytes, bytes], name: str) -> int | None:
    value = fields.get(name.encode(), b"").decode(errors="replace")
    return int(value) if value.isdecimal() else None


def _logged(folder: Path, request_id: str) -> Iterator[dict[str, Any]]:
    """Yields the lines about a request of all logs in a folder. Lines that are not JSON are skipped."""
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        try:
            with file.open(errors="replace") as lines:
                for line in lines:
                    if request_id in line and (said := _read(line)) is not None and _is_about(said, request_id):
                        yield {"file": str(file.relative_to(folder)), **said}
        except OSError as error:
            raise CommandFailed(f"{file} can't be read: {error}") from error


def _read(line: str) -> dict[str, Any] | None:
    try:
        said = json.loads(line)
    except ValueError:
        return None
    return said if isinstance(said, dict) else None


def _is_about(said: Mapping[str, Any], request_id: str) -> bool:
    others = said.get("others")
    return said.get("request_id") == request_id or (isinstance(others, list) and request_id in others)


def _shown(line: Mapping[str, Any]) -> str:
    left_out = {"timestamp", "event", "request_id", "file", "level"}
    rest = " ".join(f"{name}={value}" for name, value in line.items() if name not in left_out)
    return f"{line.get('timestamp', '')} {line['file']}: {line.get('event', '')} {rest}".rstrip()
