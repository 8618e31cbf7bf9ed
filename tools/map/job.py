"""What a job remembers besides its output: its key, and what each of its rows asks for. One run at a time has it."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from penstock.protocol.wire import in_python
from penstock.tools.map.errors import MapError

FORMAT = 1
_MODE = 0o600  # anyone with the key can compute the ids of all requests, and read their replies


class JobFile:
    """The file beside an output, locked while this object is open.

    Attributes:
        key: the random key of the ids.
        asked: what every row is asked for, such as the model and the template.
        is_new: it was made just now.

    Raises:
        MapError: another run has it, or it can't be read or written.
    """

    def __init__(self, output: Path) -> None:
        self.path = output.with_name(f"{output.name}.job")
        try:
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, _MODE)
        except OSError as error:
            raise MapError(f"{self.path} can't be written: {error}") from error
        try:
            self._lock()
            self._read(output)
        except BaseException:
            os.close(self._file)
            raise

    def begin(self, asked: Mapping[str, Any]) -> None:
        """Makes the key of a new job, and puts it on disk before any request is sent."""
        self.key, self.asked = secrets.token_hex(), dict(asked)
        content = json.dumps({"penstock_map": FORMAT, "key": self.key, "asked": self.asked}, indent=1).encode()
        try:
            os.pwrite(self._file, content, 0)
            os.fsync(self._file)
        except OSError as error:
            raise MapError(f"{self.path} can't be written: {error}") from error

    def check_same(self, asked: Mapping[str, Any]) -> None:
        """Checks that rows are asked for the same as before, because an output holds replies of one kind.

        Raises:
            MapError: something differs; the message names it.
        """
        names = [name for name in {**self.asked, **asked} if self.asked.get(name) != asked.get(name)]
        if names:
            before, now = (in_python(values.get(names[0])) for values in (self.asked, asked))
            raise MapError(f"{names[0]} was {before} when this output was begun, and is {now}: name another output")

    def close(self) -> None:
        os.close(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise MapError(f"{self.path}: another run of this job is under way") from error

    def _read(self, output: Path) -> None:
        content = os.pread(self._file, os.fstat(self._file).st_size, 0)
        self.is_new = not content
        self.key, self.asked = "", {}
        if self.is_new:
            if output.exists() and output.stat().st_size:
                self.path.unlink()
                raise MapError(f"{output} already exists and was not begun by this command: name another output")
            return
        try:
            kept = json.loads(content)
            self.key, self.asked, its_format = kept["key"], kept["asked"], kept["penstock_map"]
        except (ValueError, KeyError, TypeError) as error:
            raise MapError(f"{self.path} is damaged: name another output") from error
        if its_format != FORMAT:
            raise MapError(f"{self.path} was written by another version of Penstock: name another output")
