"""Models fetched from the hub are whole, fetched again, or refused by name."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from penstock.engine.errors import CheckpointError
from penstock.engine.loading import fetched
from penstock.engine.loading.naming.resolving import resolve
from tests.engine.loading.harms import HARMS

FILES = {"config.json": b"{}", "model.safetensors": bytes(range(256)) * 64, "empty.txt": b""}


class Hub:
    """Stands in for `snapshot_download`: keeps files as the hub's client does."""

    def __init__(self, root: Path) -> None:
        self.folder = root / "models--owner--name" / "snapshots" / ("a" * 40)
        self.asked: list[Any] = []
        self.is_there = True

    def __call__(self, model: str, *, revision: str | None, allow_patterns: list[str], force_download: bool) -> str:
        self.asked.append(allow_patterns if force_download else "all")
        if force_download and not self.is_there:
            raise ConnectionError("no network")
        blobs = self.folder.parent.parent / "blobs"
        for path in (self.folder, blobs):
            path.mkdir(parents=True, exist_ok=True)
        for name, data in FILES.items():
            if not force_download and (self.folder / name).is_symlink():
                continue
            if not force_download or name in allow_patterns:
                self._put(blobs, name, data)
        return str(self.folder)

    def _put(self, blobs: Path, name: str, data: bytes) -> None:
        is_large = name.endswith(".safetensors")
        git = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
        blob = blobs / (hashlib.sha256(data).hexdigest() if is_large else git)
        if blob.is_dir():
            blob.rename(blob.with_name("aside"))
        blob.unlink(missing_ok=True)
        blob.write_bytes(data)
        (self.folder / name).unlink(missing_ok=True)
        (self.folder / name).symlink_to(f"../../blobs/{blob.name}")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    hub = Hub(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub)
    return hub


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("harm", HARMS)
def test_a_damaged_file_is_fetched_again(harm: str, name: str, hub: Hub) -> None:
    assert resolve("owner/name") == hub.folder
    HARMS[harm]((hub.folder / name).resolve())
    assert resolve("owner/name") == hub.folder
    assert hub.asked == ["all", "all", [name]]
    assert (hub.folder / name).read_bytes() == FILES[name]
    resolve("owner/name")
    assert hub.asked[3:] == ["all"]


def test_one_that_cannot_be_fetched_again_is_refused_by_name(hub: Hub) -> None:
    resolve("owner/name")
    HARMS["zeros"]((hub.folder / "model.safetensors").resolve())
    hub.is_there = False
    with pytest.raises(CheckpointError, match=r"damaged: model\.safetensors; ConnectionError: no network"):
        resolve("owner/name")


@pytest.mark.parametrize("harm", HARMS)
def test_what_was_read_is_not_read_again(harm: str, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Path] = []
    digest = fetched._digest

    def noted(path: Path, kind: Any) -> Any:
        read.append(path)
        return digest(path, kind)

    monkeypatch.setattr(fetched, "_digest", noted)
    resolve("owner/name")
    resolve("owner/name")
    assert len(read) == len(FILES)
    HARMS[harm](hub.folder.parent.parent / fetched._MEMORY)
    resolve("owner/name")
    assert len(read) == 2 * len(FILES)


def test_files_that_are_no_links_count_as_whole(hub: Hub) -> None:
    hub.folder.mkdir(parents=True)
    (hub.folder / "config.json").write_bytes(b"anything")
    assert fetched.damaged_files(hub.folder) == []
