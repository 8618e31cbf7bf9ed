"""`penstock serve`: everything that answers on this machine, by one command."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import structlog
import typer

from penstock import stopping
from penstock.cli.shared.errors import USAGE, CommandFailed, require_gateway_extra, require_worker_extra
from penstock.cli.shared.new_key import add_key
from penstock.cli.shared.options import CONFIG, gathers, settings_options
from penstock.cli.shared.programs import GATEWAY, PROGRAMS
from penstock.cli.shared.redis import connected
from penstock.gateway.keys.secrets import Secret, new_secret, parse_secret
from penstock.gateway.keys.store import KeyStore
from penstock.local.console import console
from penstock.local.data_folder import DataFolder, FolderTaken, Owner, default_data_dir
from penstock.local.embedded import EmbeddedServerError
from penstock.local.programs import ProgramEnded
from penstock.local.service import LocalService, kept_server
from penstock.local.worker_process import DEMO_SIZES
from penstock.serving.listening import listen
from penstock.stopping import Stopping
from penstock.worker.config import default_name
from penstock.worker.logs import service_logs
from penstock.worker.settings import DEMO_MODEL, WORKER, Settings, variable
from penstock.worker.settings_loading import SettingsError, load

ABORTED = 130
CHAT_PATH = "/v1/chat/completions"

_OWN = ("model", "name", "health_port", "otel")  # each worker gets a name and a port; the model is an argument
_OF_WORKER = [name for name in Settings.model_fields if name not in _OWN]
_OF_GATEWAY = ["host", "port", "tls_certificate", "tls_key"]
_OPTIONS = [*settings_options(_OF_WORKER, WORKER), *settings_options(_OF_GATEWAY, GATEWAY), CONFIG]

_log = structlog.get_logger(__name__)


@gathers("given", _OPTIONS, lambda given: given)
def serve(
    *,
    given: dict[str, Any],
    model: Annotated[
        str | None,
        typer.Argument(help="What `--model` of a worker takes; default: the setting `model`.", metavar="MODEL"),
    ] = None,
    workers: Annotated[int, typer.Option(help="Workers, each with the model.", metavar="NUMBER", min=1, max=64)] = 1,
    api_key: Annotated[
        str | None,
        typer.Option(help="Require this API key, which `penstock keys create` made; `new` makes one.", metavar="TEXT"),
    ] = None,
    data_dir: Annotated[
        Path | None,
        typer.Option(
            help="Where the queue is kept if no Redis is named. [dim]\\[~/.local/share/penstock/serve][/]",
            metavar="PATH",
        ),
    ] = None,
) -> None:
    """Serve a model on this machine: a Redis server, a worker, a gateway and its page, until Ctrl-C.

    With --redis-url (or PENSTOCK_REDIS_URL, or REDIS_URL) that Redis is used, and none is started. Otherwise the queue
    is kept in a folder, and clients get their replies after a restart. A worker that dies is started again.
    Settings of workers and gateway that have no option here are read from the environment and penstock.toml.

    Ctrl-C or SIGTERM drains; a second one, over a second later, ends everything at once.

    Exit status: 0 drained; 1 failed; 2 wrong settings; 3 to 8 a worker could not start; 130 told to stop twice.
    """
    require_worker_extra()
    require_gateway_extra()
    plan = _planned(given, model, workers, _secret(api_key), data_dir)
    with (
        service_logs(plan.settings.log_level, plan.settings.log_format),
        stopping.current() as signals,
    ):
        try:
            is_aborted = asyncio.run(_serve(plan, signals))
        except (EmbeddedServerError, FolderTaken, OSError) as error:
            raise CommandFailed(str(error)) from error
        except ProgramEnded as error:
            raise CommandFailed(str(error), error.exit_status) from error
    if is_aborted:
        raise typer.Exit(ABORTED)


@dataclass(frozen=True, slots=True)
class _Plan:
    """The checked options."""

    settings: Settings  # of the workers
    worker: Mapping[str, Any]  # options of each worker
    gateway: Mapping[str, Any]
    num_workers: int
    secret: Secret | None  # an API key to require
    is_new: bool  # whether the key was made here
    folder: DataFolder | None  # None: a Redis is named


def _planned(
    given: dict[str, Any], model: str | None, num_workers: int, key: tuple[Secret | None, bool], data_dir: Path | None
) -> _Plan:
    config = given.pop("config", None)
    of_worker = {name: value for name, value in given.items() if name in _OF_WORKER}
    of_gateway = {name: value for name, value in given.items() if name not in of_worker}
    if model is not None:
        of_worker["model"] = model
    settings = load(WORKER, PROGRAMS, of_worker, config)
    served = load(GATEWAY, PROGRAMS, of_gateway, config)
    if settings.model is None:
        raise SettingsError(f"no model is named: penstock serve MODEL, or {variable('model')}; `demo` ships with us")
    _check_port(served.host, served.port)
    has_redis = "redis_url" in settings.model_fields_set
    if has_redis and data_dir is not None:
        raise CommandFailed("--data-dir is for a server of our own, and a Redis is named (redis_url)", USAGE)
    sizes = DEMO_SIZES if settings.model == DEMO_MODEL else {}
    level = "debug" if settings.log_level == "debug" else "info"  # of what is said, this process leaves out the rest
    common = {"log_level": level, **({} if config is None else {"config": config})}
    redis = {"redis_url": given["redis_url"]} if "redis_url" in given else {}
    sized = {name: value for name, value in sizes.items() if name not in settings.model_fields_set}
    return _Plan(
        settings,
        {**sized, **of_worker, **common},
        {**of_gateway, **redis, **common, **({} if key[0] is None else {"require_key": "on"})},
        num_workers,
        *key,
        None if has_redis else DataFolder((data_dir or _default_dir()).expanduser().absolute()),
    )


async def _serve(plan: _Plan, signals: Stopping) -> bool:
    """Serves until told to stop. Returns whether it was told so twice."""
    async with AsyncExitStack() as stack:
        redis_url, beside, own = plan.settings.redis_url, [], {}
        if plan.folder is not None:
            folder = stack.enter_context(plan.folder)
            server, keeping = await stack.enter_async_context(kept_server(folder))
            redis_url, beside, own = server.url, [keeping], {"redis_url": server.url}
            folder.note(Owner(os.getpid(), redis_url))
            _log.info("server_started", program="redis", url=redis_url, folder=str(folder.path))
        has_keys = await _require(redis_url, plan.secret)

        def ready(url: str) -> None:
            if plan.folder is not None:
                plan.folder.note(Owner(os.getpid(), redis_url, url))
            _say_ready(plan, url, redis_url, has_keys=has_keys)

        base = plan.settings.name or default_name()
        names = [base if plan.num_workers == 1 else f"{base}-{number}" for number in range(1, plan.num_workers + 1)]
        workers = [{**plan.worker, **own, "name": name, "health_port": 0} for name in names]
        service = LocalService(workers, {**plan.gateway, **own}, ready)
        with signals.serving(asyncio.get_running_loop(), service.stop, service.reload):
            await service.run(*beside)
    _log.info("stopped")
    return service.is_aborted


async def _require(redis_url: str, secret: Secret | None) -> bool:
    """Adds the key unless it is there. Returns whether the gateway requires one.

    Raises:
        CommandFailed: the key was revoked, or it is another one with the same id.
        PenstockError: Redis can't be reached, or refuses.
    """
    async with connected(redis_url) as redis:
        store = KeyStore(redis.execute_command)
        if secret is not None:
            found = await store.find(secret.key_id)
            if found.state == "unknown":
                await add_key(store, secret, {"name": None})
            elif found.state != "active" or found.key is None or not secret.fits(found.key.digest):
                raise CommandFailed(f"the key {secret.key_id} of --api-key can't be used: it is {found.state}", USAGE)
        return bool(await store.list())


def _secret(text: str | None) -> tuple[Secret | None, bool]:
    """Returns the key that an option names, and whether it was made just now."""
    if text is None:
        return None, False
    if text == "new":
        return new_secret(), True
    secret = parse_secret(text)
    if secret is None:
        raise SettingsError("--api-key: must be `new`, or a key of the form that `penstock keys create` prints")
    return secret, False


def _check_port(host: str, port: int) -> None:
    """Reports early what the gateway would find only once everything else runs."""
    try:
        listen(host, port).close()
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno is not None and error.errno > 0 else error
        raise CommandFailed(f"cannot listen on {host} port {port}: {reason}; set --port") from error


def _default_dir() -> Path:
    try:
        return default_data_dir()
    except RuntimeError as error:
        raise CommandFailed(f"there is no home folder ({error}); give a folder with --data-dir", USAGE) from error


def _say_ready(plan: _Plan, url: str, redis_url: str, *, has_keys: bool) -> None:
    body = {"model": plan.settings.model, "messages": [{"role": "user", "content": "What is 347 + 85?"}]}
    key = ' -H "authorization: Bearer $API_KEY"' if has_keys else ""
    insecure = " -k" if url.startswith("https") else ""
    sent = f"-H 'content-type: application/json' -d {shlex.quote(json.dumps(body))}"
    lines = [
        "",
        f"{plan.settings.model} is served at {url} (a page to try it; for clients of OpenAI: {url}/v1).",
        *([f"API key, which is not shown again: {plan.secret.text}"] if plan.secret and plan.is_new else []),
        f"  curl{insecure} {url}{CHAT_PATH}{key} {sent}",
    ]
    if plan.folder is not None:
        lines += [f"  penstock {name} --redis-url {redis_url}" for name in ("chat", "top")]
    lines.append("Ctrl-C stops it.")
    screen = console(soft_wrap=True)
    screen.print("\n".join(lines), markup=False)
    screen.file.flush()
