"""Models in several GGUF files, as llama-gguf-split writes them: the first one describes the model."""

from __future__ import annotations

import re
from pathlib import Path

from penstock.engine.errors import CheckpointError, listed, shown
from penstock.engine.loading.gguf.header import GGUFHeader, TensorInfo, read_header

_NUMBER, _COUNT, _TENSORS = "split.no", "split.count", "split.tensors.count"
_NAME = re.compile(r"(?P<model>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


def names_of_parts(name: str) -> list[str]:
    """Returns the names of all files of the model that a file belongs to, by its name; itself, if it is the only one.
    What comes before the last `/` stays.
    """
    named = _NAME.fullmatch(name)
    if named is None:
        return [name]
    model, count = named["model"], named["count"]
    return [f"{model}-{number:05}-of-{count}.gguf" for number in range(1, int(count) + 1)] or [name]


def read_parts(file: Path) -> GGUFHeader:
    """Reads the header of a model, of which `file` is the only file or any one of several beside each other.

    Raises:
        CheckpointError: a file is missing, cannot be read, is not a GGUF file, or is not the part that its name says.
    """
    header = read_header(file)
    count = header.metadata.get(_COUNT, 1)
    if count in (0, 1):
        return header
    parts = [file.with_name(name) for name in names_of_parts(file.name)]
    if len(parts) != count:
        raise CheckpointError(
            f"{file.name} has {_COUNT} = {shown(count)}; the name of such a file ends in its number and their count, "
            "such as -00001-of-00003.gguf"
        )
    missing = [part.name for part in parts if not part.exists()]
    if missing:
        raise CheckpointError(f"{file.name} is one of {count} files of a model; not beside it: {listed(missing, 1)}")
    return _joined([header if part == file else read_header(part) for part in parts])


def _joined(headers: list[GGUFHeader]) -> GGUFHeader:
    tensors: dict[str, TensorInfo] = {}
    for number, header in enumerate(headers):
        stated = [header.metadata.get(key) for key in (_NUMBER, _COUNT)]
        if stated != [number, len(headers)]:
            raise CheckpointError(
                f"{header.file.name} has {_NUMBER} = {shown(stated[0])} and {_COUNT} = {shown(stated[1])}, "
                f"expected {number} and {len(headers)}"
            )
        for name in header.tensors:
            if name in tensors:
                raise CheckpointError(
                    f"{header.file.name} and {tensors[name].file.name} both have tensor {shown(name)}"
                )
        tensors |= header.tensors
    first = headers[0]
    num_tensors = first.metadata.get(_TENSORS, len(tensors))
    if num_tensors != len(tensors):
        raise CheckpointError(
            f"{first.file.name} has {_TENSORS} = {shown(num_tensors)}, and the {len(headers)} files hold {len(tensors)}"
        )
    return GGUFHeader(first.file, first.metadata, tensors)
