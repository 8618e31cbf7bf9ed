"""Reads keys as they are pressed, without Enter and without an echo."""

from __future__ import annotations

import asyncio
import os
import termios
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_SEQUENCES = {
    b"\x1b[A": "up", b"\x1bOA": "up", b"\x1b[B": "down", b"\x1bOB": "down", b"\x1b[Z": "backtab", b"\t": "tab",
}  # fmt: skip


@contextmanager
def pressed(descriptor: int, on_key: Callable[[str], None]) -> Iterator[None]:
    """Calls `on_key` for each key, from the running event loop, while the block lasts; then restores the terminal.

    Signals still work: Ctrl-C is not one of the keys.
    """
    loop = asyncio.get_running_loop()
    before = termios.tcgetattr(descriptor)

    def read() -> None:
        data = os.read(descriptor, 1024)
        if not data:  # the terminal is gone
            loop.remove_reader(descriptor)
            on_key("q")
        for key in keys_of(data):
            on_key(key)

    tty.setcbreak(descriptor)
    loop.add_reader(descriptor, read)
    try:
        yield
    finally:
        loop.remove_reader(descriptor)
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def keys_of(data: bytes) -> Iterator[str]:
    """Splits one read from a terminal into keys: single characters, and the names of keys that send several."""
    while data:
        length = next((len(each) for each in _SEQUENCES if data.startswith(each)), 0)
        if length:
            yield _SEQUENCES[data[:length]]
        elif data[:1] == b"\x1b":  # Escape, or a key without a name: all of it
            yield "escape"
            return
        else:
            length = 1
            yield data[:1].decode("ascii", "replace").lower()
        data = data[length:]
