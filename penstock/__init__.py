"""Penstock: a message-queue worker service for LLM inference. Here is the client; `penstock worker` runs a worker.

from penstock import Client

with Client() as client:
    for chunk in client.stream("12 + 30 ="):
        print(chunk.text, end="", flush=True)

`LLM` is the engine without a queue; it needs the worker extra.
"""

from penstock.installed import how_to_install, refuse_shadowed
from penstock.stopping import listen_early

listen_early()  # before the imports below, which take a moment
refuse_shadowed()

import importlib  # noqa: E402
from typing import TYPE_CHECKING  # noqa: E402

from penstock import producer  # noqa: E402
from penstock.producer import *  # noqa: F403, E402  its `__all__` is the one list of what users import
from penstock.protocol.version import __version__  # noqa: E402

if TYPE_CHECKING:
    from penstock.local.llm import LLM as LLM

__all__ = ["__version__"]  # without LLM, so that `import *` stays light and works without the worker extra
__all__ += producer.__all__

if not TYPE_CHECKING:  # whose reader would take every name for one that is here

    def __getattr__(name: str) -> object:
        """Loads `LLM`, and with it JAX, when it is asked for."""
        if name != "LLM":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        try:
            return importlib.import_module("penstock.local.llm").LLM
        except ModuleNotFoundError as error:
            if (error.name or "").startswith("penstock"):
                raise
            how = how_to_install("worker")
            message = f"LLM needs {error.name}, which is not installed; install it with: {how}"
            raise ModuleNotFoundError(message, name=error.name) from error


def __dir__() -> list[str]:
    """Returns what there is for users, and `LLM`."""
    return sorted([*__all__, "LLM"])
