"""Renders a model's chat template where it can be killed."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from penstock.engine.errors import InvalidRequest
from penstock.engine.sandbox import Bounds, RequestEnded, Sandbox

# `template_process.py` limits the output's length.
BOUNDS = Bounds(cpu_s=2.0, max_bytes=2**28, max_bytes_per_byte=16, max_idle_bytes=2**27)

_PROGRAM = Path(__file__).with_name("template_process.py")


class RenderingEnded(InvalidRequest):
    """A rendering exceeded its bounds, or its process was killed: it may succeed another time."""


def accepted(render: Callable[[], str]) -> str | None:
    """Returns what `render` returns, or None if the template does not accept it.

    Raises:
        RenderingEnded: nothing was found out.
    """
    try:
        return render()
    except RenderingEnded:
        raise
    except InvalidRequest:
        return None


class ChatTemplate:
    """Renders one template in processes of its own. Any thread may use it."""

    def __init__(self, source: str) -> None:
        self._sandbox = Sandbox(_PROGRAM, source, BOUNDS)

    def render(self, variables: Mapping[str, Any], *, now_s: float | None = None) -> str:
        """Renders the template. Blocks while it runs, which the bounds keep short.

        Args:
            variables: the template's variables.
            now_s: the template's current time, in Unix time; None: the real one.

        Raises:
            InvalidRequest: the template refuses the variables, fails, or makes too much text.
            RenderingEnded: it takes too much time or memory.
            EngineError: no process can run here.
        """
        return self._answer({"variables": variables, "now_s": time.time() if now_s is None else now_s})

    def variables(self) -> list[str]:
        """Compiles the template, and returns the names of its variables. Blocks and raises like `render`."""
        found: list[str] = json.loads(self._answer({}))
        return found

    def _answer(self, request: Mapping[str, Any]) -> str:
        try:
            answer = self._sandbox.ask(request)
        except RequestEnded as error:
            raise RenderingEnded(f"the model's chat template failed: {error}") from None
        if "refused" in answer:
            raise InvalidRequest(f"the model's chat template refuses these messages: {answer['refused']}")
        if "failed" in answer:
            raise InvalidRequest(f"the model's chat template failed: {answer['failed']}")
        return str(answer["text"])
