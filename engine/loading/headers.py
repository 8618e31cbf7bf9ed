"""Reads what a checkpoint's weight files hold: their headers, and the index if there are several."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from penstock.engine.errors import CheckpointError, listed
from penstock.engine.loading.files import read_json
from penstock.engine.loading.weights import Stored, open_weights

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
NAMED_AT_MOST = 5  # tensors in one message


def stored_tensors(directory: Path) -> dict[str, Stored]:
    """Reads the headers of all weight files, by tensor name, and nothing else of the files."""
    if (directory / WEIGHTS_FILE).exists():
        return dict(_header(directory / WEIGHTS_FILE))
    if not (directory / INDEX_FILE).exists():
        raise CheckpointError(
            f"there is neither {WEIGHTS_FILE} nor {INDEX_FILE} in {directory}; "
            "weights in other formats must be converted to safetensors"
        )
    file_of = _weight_map(directory)
    stored: dict[str, Stored] = {}
    for file in dict.fromkeys(file_of.values()):
        header = dict(_header(file))
        indexed = {name for name, holder in file_of.items() if holder == file}
        refuse_names(indexed - header.keys(), f"{file.name} lacks tensors that {INDEX_FILE} places there")
        refuse_names(header.keys() - indexed, f"{file.name} holds tensors that {INDEX_FILE} does not place there")
        stored |= header
    return stored


def _weight_map(directory: Path) -> dict[str, Path]:
    names = read_json(directory / INDEX_FILE).get("weight_map")
    if not isinstance(names, dict) or not names or not all(isinstance(file, str) for file in names.values()):
        raise CheckpointError(f"{directory / INDEX_FILE} has no weight_map from tensor names to files")
    outside = sorted({file for file in names.values() if Path(file).name != file})
    if outside:
        raise CheckpointError(f"{INDEX_FILE} names {outside[0]!r}, which is not a file name inside {directory}")
    missing = sorted({file for file in names.values() if not (directory / file).exists()})
    if missing:
        raise CheckpointError(f"{INDEX_FILE} names {', '.join(missing)}, not found in {directory}")
    return {name: directory / file for name, file in names.items()}


def _header(file: Path) -> Iterator[tuple[str, Stored]]:
    with open_weights(file) as tensors:
        for name in tensors.keys():  # noqa: SIM118 -- not a mapping
            entry = tensors.get_slice(name)
            yield name, Stored(file, tuple(entry.get_shape()), entry.get_dtype())


def refuse_names(names: set[str], why: str, stored: Mapping[str, Stored] | None = None) -> None:
    if not names:
        return
    shown = [f"{name} ({stored[name].file.name})" if stored else name for name in sorted(names)]
    raise CheckpointError(f"{why}: {listed(shown, NAMED_AT_MOST)}")
