"""Damages files: a full disk, a crash before anything was written, a slip of the hand, flipped bits."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path


def _changed(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    """Returns a harm that replaces the file, so that whoever has it open or mapped is not disturbed."""

    def harm(path: Path) -> None:
        data = path.read_bytes()
        path.unlink()
        path.write_bytes(change(data))

    return harm


def _flipped(place: float) -> Callable[[bytes], bytes]:
    def flip(data: bytes) -> bytes:
        at = min(len(data) - 1, int(len(data) * place))
        return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]

    return flip


def _other(make: Callable[[Path], object]) -> Callable[[Path], None]:
    """Returns a harm that puts something in the file's place that is not a file."""

    def harm(path: Path) -> None:
        path.unlink()
        make(path)

    return harm


HARMS: dict[str, Callable[[Path], None]] = {
    "empty": _changed(lambda data: b""),
    "junk": _changed(lambda data: b"no program"),
    "cut in half": _changed(lambda data: data[: len(data) // 2]),
    "cut by a byte": _changed(lambda data: data[:-1]),
    "longer": _changed(lambda data: data + b"\0"),
    "zeros": _changed(lambda data: bytes(len(data))),
    "zeros at the end": _changed(lambda data: data[: len(data) // 2] + bytes(len(data) - len(data) // 2)),
    "first byte": _changed(_flipped(0)),
    "a byte": _changed(_flipped(0.6)),
    "last byte": _changed(_flipped(1)),
    "gone": Path.unlink,
    "a folder": _other(Path.mkdir),
    "a folder that holds something": _other(lambda path: (path / "some" / "thing").mkdir(parents=True)),
    "a pipe": _other(os.mkfifo),
    "a device": _other(lambda path: path.symlink_to("/dev/zero")),
    "a link to itself": _other(lambda path: path.symlink_to(path)),
}
