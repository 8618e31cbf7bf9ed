"""`penstock demo`: the whole path on this machine, with no setup before and nothing left behind."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import signal
import time
from collections.abc import Coroutine
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.markup import escape

from penstock.cli.shared.errors import CommandFailed, missing_gateway_extra, require_worker_extra
from penstock.cli.shared.options import takes_settings
from penstock.installed import how_to_install
from penstock.local.console import console as console_of
from penstock.local.embedded import EmbeddedServer, EmbeddedServerError
from penstock.local.gateway_process import GatewayEnded, local_gateway
from penstock.local.worker_process import DEMO_SIZES, WorkerEnded, local_worker, wait_joined
from penstock.producer import AsyncClient, Reply
from penstock.worker.settings import DEMO_MODEL, Settings

PROMPTS = (
    "What is 347 + 85?",
    "Count from 96 to 104.",
    "How do you spell river?",
    "Which month is 10 months before August?",
    "Tell me a short story about a turtle.",
)

CHAT_PATH = "/v1/chat/completions"
HTTP_TIMEOUT_S = 120.0

_Result = TypeVar("_Result")

_WORKER_SETTINGS: dict[str, Any] = {
    **DEMO_SIZES, "queue": "default", "name": "demo", "model": DEMO_MODEL,
    "health_port": 0, "drain_timeout_s": 5, "log_level": "warning",
}  # fmt: skip


@takes_settings(["compile_cache_dir"])
def demo(
    *,
    settings: Settings,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of one answer.", min=1)] = 160,
) -> None:
    """Try the whole path here: a Redis server, a worker with the demo model, a gateway, a few prompts.

    It stops what it started, and keeps compiled programs, so the next start is quicker.
    """
    require_worker_extra()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    console = console_of(soft_wrap=True)
    started = time.monotonic()
    try:
        with EmbeddedServer() as server:
            console.print(f"A Redis server runs at {server.url}; a worker loads the demo model.")
            console.print("[dim]The first start compiles for a minute or more: kernels, then programs.[/]")
            asyncio.run(_run(console, server, settings, started, max_tokens))
    except (EmbeddedServerError, WorkerEnded, GatewayEnded) as error:
        raise CommandFailed(str(error)) from error
    finally:
        console.print("[dim]stopped what was started[/]")


async def _run(console: Console, server: EmbeddedServer, settings: Settings, started: float, max_tokens: int) -> None:
    values = {**_WORKER_SETTINGS, "compile_cache_dir": settings.compile_cache_dir}
    async with local_worker(server.url, values) as worker:
        await wait_joined(worker, server.url, values["queue"], values["name"])
        async with AsyncClient(server.url) as client:
            for prompt in PROMPTS:
                reply = await _unless_ended(worker, _ask(console, client, prompt, started, max_tokens))
                _summarise(console, reply)
        if missing := missing_gateway_extra():
            console.print(f"\nOver HTTP: not without {missing[0]}; {how_to_install('gateway')}", markup=False)
        else:
            async with local_gateway(server.url) as gateway_url:
                await _unless_ended(worker, _ask_over_http(console, gateway_url))
        console.print("\n`penstock serve demo` does the same and stays up, with a page to try it.", markup=False)


async def _ask(console: Console, client: AsyncClient, prompt: str, started: float, max_tokens: int) -> Reply:
    messages = [{"role": "user", "content": prompt}]
    has_begun = False
    async with client.stream(messages, max_tokens=max_tokens, temperature=0.0) as chunks:
        async for chunk in chunks:
            if not has_begun:
                has_begun = True
                if prompt == PROMPTS[0]:
                    console.print(f"[dim]first token {time.monotonic() - started:.1f} s after the start[/]")
                console.print(f"\n[bold cyan]> {escape(prompt)}[/]")
            console.out(chunk.text, end="", highlight=False)
            console.file.flush()
        console.print()
        return await chunks.read_to_end()


async def _ask_over_http(console: Console, gateway_url: str) -> None:
    body = json.dumps({"model": DEMO_MODEL, "messages": [{"role": "user", "content": PROMPTS[0]}], "temperature": 0})
    console.print("\nThe same over HTTP, as from any client of OpenAI's API:")
    console.print(f"  curl {gateway_url}{CHAT_PATH} -H 'content-type: application/json' -d '{body}'", markup=False)
    console.print(await asyncio.to_thread(_post, gateway_url, body), markup=False, highlight=False)


def _post(gateway_url: str, body: str) -> str:
    connection = http.client.HTTPConnection(gateway_url.removeprefix("http://"), timeout=HTTP_TIMEOUT_S)
    try:
        with contextlib.closing(connection):
            connection.request("POST", CHAT_PATH, body, {"content-type": "application/json"})
            answer = connection.getresponse()
            text = answer.read().decode()
    except (OSError, http.client.HTTPException) as error:
        raise CommandFailed(f"the gateway at {gateway_url} did not answer: {error}") from error
    if answer.status != http.HTTPStatus.OK:
        raise CommandFailed(f"the gateway answered {answer.status}: {text}")
    return text


def _summarise(console: Console, reply: Reply) -> None:
    ttft_ms, total_ms = reply.timings.ttft_ms, reply.timings.total_ms
    console.print(f"[dim]{reply.usage.completion_tokens} tokens, first after {ttft_ms} ms, all after {total_ms} ms[/]")


async def _unless_ended(worker: asyncio.subprocess.Process, work: Coroutine[Any, Any, _Result]) -> _Result:
    """Returns the result of `work`; raises CommandFailed as soon as the worker ends."""
    task = asyncio.create_task(work)
    ended = asyncio.create_task(worker.wait())
    try:
        await asyncio.wait([task, ended], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise CommandFailed(f"the worker ended with status {ended.result()}")
    finally:
        for each in (task, ended):
            each.cancel()
        await asyncio.gather(task, ended, return_exceptions=True)
