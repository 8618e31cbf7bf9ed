"""Runs `penstock worker` with the fake engine, or `penstock gateway`, and sends it signals from its first stop on.

SIGHUP, SIGTERM and SIGINT come as each Python function begins to run for the first time, to the end of the interpreter.
Up to the end of the service they count as that same stop, from then on as later ones. Run as a program, with the
command's own arguments.
"""

from __future__ import annotations

import math
import signal
import sys
from types import CodeType, FrameType
from unittest import mock

from penstock import stopping
from penstock.cli import main
from penstock.stopping import Stopping
from penstock.tools.chaos.fake_engine import FakeEngine, fake_model


class AtEachCall:
    """A profile function that holds all it needs: modules are emptied before the interpreter is gone."""

    def __init__(self, signals: Stopping) -> None:
        self._signals = signals
        self._met: set[CodeType] = set()
        self._module = stopping
        self._send = signal.raise_signal
        self._numbers = (signal.SIGHUP, signal.SIGTERM, signal.SIGINT)
        self._ever = math.inf

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code not in self._met:
            self._met.add(frame.f_code)
            self._module.SAME_STOP_S = 0.0 if self._signals._is_over else self._ever
            for number in self._numbers:
                self._send(number)


class Signalled(Stopping):
    def is_new_stop(self, came_s: float | None = None) -> bool:
        is_first = not self.is_stopping
        is_new = super().is_new_stop(came_s)
        if is_first:
            sys.setprofile(AtEachCall(self))
        return is_new


if __name__ == "__main__":
    model = fake_model(FakeEngine(step_s=0.01))
    with (
        mock.patch("penstock.cli.shared.serve.load_model", return_value=model),
        mock.patch.object(stopping, "Stopping", Signalled),
    ):
        main()
