"""`penstock send`: one request from the command line. Needs the light client only."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
from typing import Annotated, Any, cast

import typer
from pydantic_core import to_jsonable_python

from penstock.cli.shared.answer import AnswerWriter
from penstock.cli.shared.errors import CommandFailed
from penstock.cli.shared.options import takes_settings
from penstock.cli.shared.sampling import takes_sampling
from penstock.cli.shared.waiting import shown_wait
from penstock.producer import AsyncClient, Chunk, Reply
from penstock.producer.request import Prompt
from penstock.protocol.wire import Sampling
from penstock.worker.settings import Settings


@takes_settings(["redis_url", "queue"])
@takes_sampling()
def send(
    *,
    settings: Settings,
    sampling: dict[str, Any],
    prompt: Annotated[
        list[str] | None, typer.Argument(help="The prompt. Default: standard input.", metavar="PROMPT")
    ] = None,
    system: Annotated[str | None, typer.Option(help="System message of the chat.", metavar="TEXT")] = None,
    plain: Annotated[
        bool, typer.Option("--plain", help="Complete the text as it is, without the chat template.")
    ] = False,
    stream: Annotated[bool, typer.Option(help="Print tokens as they come.")] = True,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per chunk, and one for the end.")
    ] = False,
    wait: Annotated[
        float | None, typer.Option(help="Seconds to wait for the end of the reply.", metavar="NUMBER", min=0.0)
    ] = None,
) -> None:
    """Send a prompt and print the answer.

    Text and tool calls go to stdout, reasoning to stderr. A request to a queue without workers waits for one. Ctrl-C
    cancels it.

    Exit status: 0 the answer is complete; 1 it failed, was cancelled or expired; 130 interrupted.
    """
    if plain and system is not None:
        raise typer.BadParameter("a system message needs the chat template: leave out --plain", param_hint="--system")
    text = " ".join(prompt) if prompt else sys.stdin.read().removesuffix("\n")
    printer = _Printer(as_json=as_json, stream=stream and sampling.get("n", "1") == "1")
    reply = asyncio.run(_follow(settings, _prompt(text, system, plain), cast("Sampling", sampling), wait, printer))
    printer.end(reply)
    if reply.finish_reason in ("cancelled", "expired"):
        raise CommandFailed(f"the request was not finished: {reply.finish_reason}")


async def _follow(
    settings: Settings, prompt: Prompt, sampling: Sampling, wait: float | None, printer: _Printer
) -> Reply:
    async with (
        AsyncClient(settings.redis_url, queue=settings.queue) as client,
        client.stream(prompt, timeout=wait, **sampling) as chunks,
        shown_wait(client, settings.queue, chunks) as end_wait,
    ):
        async for chunk in chunks:
            await end_wait()
            printer.chunk(chunk)
        return await chunks.read_to_end()


def _prompt(text: str, system: str | None, plain: bool) -> Prompt:
    if plain:
        return text
    messages = [] if system is None else [{"role": "system", "content": system}]
    return [*messages, {"role": "user", "content": text}]


@dataclasses.dataclass(frozen=True, slots=True)
class _Printer:
    """Writes an answer, for people or as JSON lines, as it comes or at the end."""

    as_json: bool
    stream: bool
    writer: AnswerWriter = dataclasses.field(default_factory=AnswerWriter)

    def chunk(self, chunk: Chunk) -> None:
        if not self.stream:
            return
        if self.as_json:
            typer.echo(_json_line("chunk", chunk))
        else:
            self.writer.add(chunk)

    def end(self, reply: Reply) -> None:
        if self.as_json:
            typer.echo(_json_line("end", reply))
        elif self.stream:
            self.writer.end()
        else:
            for choice in reply.choices:
                writer = AnswerWriter("" if len(reply.choices) == 1 else f"[{choice.index}] ")
                writer.add_whole(choice)
                writer.end()


def _json_line(kind: str, value: Chunk | Reply) -> str:
    return json.dumps({"type": kind, **to_jsonable_python(value, exclude_none=True)}, ensure_ascii=False)
