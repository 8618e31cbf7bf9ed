"""A server whose wall clock tests can shift; the clocks of the tests' own processes stay as they are."""

from __future__ import annotations

import mmap
import shlex
import shutil
import struct
import subprocess
import sys
import time
from pathlib import Path

from redis import Redis as BlockingRedis

from penstock.local.embedded import EmbeddedServer
from tests.support.patience import WAIT_S

NEAR_S = 2.0  # steps are longer
_SOURCE = Path(__file__).with_name("shifted_clock.c")


class ShiftedServer(EmbeddedServer):
    """A running server whose clock `set_ahead` sets, where `can_be_set`.

    Args:
        program: the server's program.
        folder: where the shim is built.
    """

    def __init__(self, program: Path, folder: Path) -> None:
        self.can_be_set = _can_be_shifted(program)
        if not self.can_be_set:
            super().__init__(program)
            return
        library, shift, wrapper = folder / "shifted_clock.so", folder / "shift", folder / "server"
        subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, _SOURCE, "-ldl"], check=True)
        shift.write_bytes(bytes(8))
        environment = f"LD_PRELOAD={shlex.quote(str(library))} CLOCK_SHIFT_FILE={shlex.quote(str(shift))}"
        wrapper.write_text(f'#!/bin/sh\n{environment} exec {shlex.quote(str(program))} "$@"\n')
        wrapper.chmod(0o700)
        with shift.open("r+b") as file:
            self._shift = mmap.mmap(file.fileno(), 8)
        super().__init__(wrapper)

    def set_ahead(self, seconds: float) -> None:
        """Sets the server's clock ahead of the real one, or behind it if `seconds` is below 0.

        Returns once the server, which looks at its clock once in a millisecond, has seen it.
        """
        self._shift[:] = struct.pack("<q", round(seconds * 1_000_000))
        give_up_s = time.monotonic() + WAIT_S
        with BlockingRedis.from_url(self.url, protocol=2) as client:
            while abs(client.time()[0] - time.time() - seconds) > NEAR_S:
                assert time.monotonic() < give_up_s, "the server's clock does not follow"


def _can_be_shifted(program: Path) -> bool:
    """Checks for a compiler, and for a loader that puts its output before the C library of `program`."""
    if sys.platform != "linux" or shutil.which("cc") is None:
        return False
    return b"ld-linux" in program.read_bytes()  # the loader that a program names which is linked dynamically
