"""Refuses files that are one part of a model, as llama-gguf-split writes them: a model must be in one file."""

from __future__ import annotations

import re

from penstock.engine.errors import ConfigError, shown
from penstock.engine.loading.gguf.header import GGUFHeader

PART_NAME = re.compile(r"(?P<model>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


def refuse_part(header: GGUFHeader) -> None:
    """Refuses a part before anything else is read: only the first part describes the model.

    Raises:
        ConfigError: `header` is that of a part. The message says which part to pass to the merging tool, and which
            ones are missing.
    """
    stated = header.metadata.get("split.count", 1)
    if stated in (0, 1):
        return
    if type(stated) is not int or stated < 0:
        raise ConfigError(f"{header.file.name} has split.count = {shown(stated)}, expected a whole number")
    number = header.metadata.get("split.no")
    place = f"part {number + 1}" if type(number) is int and 0 <= number < stated else "one"
    raise ConfigError(
        f"{header.file.name} is {place} of {stated} files that a model is split into; {_cure(header, stated)}"
    )


def _cure(header: GGUFHeader, stated: int) -> str:
    named = PART_NAME.fullmatch(header.file.name)
    if named is None:
        return "merge them, from the first one on: llama-gguf-split --merge FIRST.gguf MODEL.gguf"
    model, count = named["model"], int(named["count"])
    if count != stated:
        return f"its name says that they are {count}, so that it is of another model, or was renamed"
    parts = [f"{model}-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1)]
    missing = [part for part in parts if not (header.file.parent / part).exists()]
    merge = f"merge them: llama-gguf-split --merge {parts[0]} {model}.gguf"
    if not missing:
        return merge
    more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
    return f"{missing[0]}{more} of them are not beside it; get them, then {merge}"
