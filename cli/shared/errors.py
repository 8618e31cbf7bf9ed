"""How a subcommand ends in failure."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

from penstock.installed import how_to_install
from penstock.protocol.errors import PenstockError
from penstock.worker.errors import WorkerError
from penstock.worker.settings_loading import SettingsError

USAGE = 2  # exit status for wrong usage
GATEWAY_EXTRA = ("starlette", "uvicorn", "httptools", "python_multipart", "prometheus_client")
WORKER_EXTRA = (
    "jax", "flax", "transformers", "tokenizers", "safetensors", "jinja2", "prometheus_client", "uvicorn", "httptools",
)  # fmt: skip


class CommandFailed(Exception):
    """Ends the command with `exit_status` and the message on stderr."""

    def __init__(self, message: str, exit_status: int = 1) -> None:
        super().__init__(message)
        self.exit_status = exit_status


def exit_status_of(error: Exception) -> int | None:
    """Returns the exit status for an error that its message explains; None for any other."""
    if isinstance(error, CommandFailed | WorkerError):
        return error.exit_status
    if isinstance(error, SettingsError):
        return 2
    return 1 if isinstance(error, PenstockError) else None


def missing_worker_extra() -> list[str]:
    """Returns missing modules of the worker extra. Imports none of it."""
    return _missing(WORKER_EXTRA)


def missing_gateway_extra() -> list[str]:
    """Returns missing modules of the gateway extra, without imports."""
    return _missing(GATEWAY_EXTRA)


def require_worker_extra() -> None:
    """Checks that the worker extra is installed.

    Raises:
        CommandFailed: something is missing; the message says how to install it.
    """
    _require("worker", WORKER_EXTRA)


def require_gateway_extra() -> None:
    """Checks that the gateway extra is installed. Raises like `require_worker_extra`."""
    _require("gateway", GATEWAY_EXTRA)


def _require(extra: str, modules: Sequence[str]) -> None:
    missing = _missing(modules)
    if missing:
        raise CommandFailed(f"{missing[0]} is not installed; install it with: {how_to_install(extra)}")


def _missing(modules: Sequence[str]) -> list[str]:
    return [name for name in modules if importlib.util.find_spec(name) is None]
