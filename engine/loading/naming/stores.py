"""Models in an object store, `s3://` or `gs://`: one GGUF file, or the folder of a checkpoint."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any
from urllib.parse import urldefrag

from penstock.engine.errors import CheckpointError
from penstock.engine.loading.naming.cache import fetched_once
from penstock.engine.loading.naming.digests import check_digest, stated_digest
from penstock.engine.loading.naming.hub import HUB_FILES
from penstock.engine.loading.source import GGUF_SUFFIX
from penstock.engine.progress import ReportProgress
from penstock.installed import how_to_install

STORES: Mapping[str, str] = {"s3": "s3fs", "gs": "gcsfs"}
"""The packages that speak a store's protocol, by scheme. The extra `stores` has them."""

CHUNK_BYTES = 1 << 20


def is_in_store(model: str) -> bool:
    """Whether a model is named by the URL of an object store."""
    return model.partition("://")[0] in STORES and "://" in model


def fetch_from_store(url: str, report: ReportProgress) -> Path:
    """Returns the file or folder of a URL, from the cache if it was fetched before.

    Credentials come from where the store's own programs look for them.

    Raises:
        CheckpointError: the package for the store is missing, the store does not deliver the model, or the digest of a
            file is another.
    """
    import fsspec  # as in `hub`

    address, fragment = urldefrag(url)
    digest = stated_digest(fragment)
    if fragment and (digest is None or not address.endswith(GGUF_SUFFIX)):
        raise CheckpointError(f"the fragment of {address} is not sha256= with 64 hex digits, or it is not a file")

    def fetch(folder: Path) -> Path:
        try:
            store, root = fsspec.core.url_to_fs(address)
            return _fetched(store, root.rstrip("/"), folder, digest, report)
        except ImportError as error:
            needs = STORES[address.partition("://")[0]]
            raise CheckpointError(f"{address} needs {needs}: {how_to_install('stores')}") from error
        except CheckpointError:
            raise
        except Exception as error:  # each store raises errors of its own libraries
            raise CheckpointError(f"{address} can't be fetched: {type(error).__name__}: {error}") from error

    return fetched_once(url, fetch)


def _fetched(store: Any, root: str, folder: Path, digest: str | None, report: ReportProgress) -> Path:
    is_file = root.endswith(GGUF_SUFFIX)
    names = [root] if is_file else [each for each in store.ls(root, detail=False) if _is_wanted(Path(each).name)]
    if not names:
        raise CheckpointError(f"{root} has no files of a checkpoint")
    place = folder if is_file else folder / "model"
    place.mkdir(exist_ok=True)
    sizes = [store.size(name) for name in names]
    done = 0
    for name, size in zip(names, sizes, strict=True):
        file = place / Path(name).name
        before, total = done, sum(sizes)
        _stream(store, name, size, file, lambda have, what: report(before + have, total, what))  # noqa: B023  called at once
        done += size
    if not is_file:
        return place
    file = place / Path(root).name
    if digest is not None:
        check_digest(file, digest, root)
    return file


def _stream(store: Any, name: str, size: int, file: Path, tell: Any) -> None:
    """Fetches one file, from where an earlier try at the same version of it stopped."""
    version = hashlib.sha256(str(store.ukey(name)).encode()).hexdigest()[:12]
    part = file.with_name(f"{file.name}.{version}.part")
    have = part.stat().st_size if part.exists() else 0
    with store.open(name, "rb") as source, part.open("ab") as out:
        source.seek(have)
        while chunk := source.read(CHUNK_BYTES):
            out.write(chunk)
            have += len(chunk)
            tell(have, file.name)
    if have != size:
        part.unlink()
        raise CheckpointError(f"{name} came with {have} bytes, and has {size}")
    part.replace(file)


def _is_wanted(name: str) -> bool:
    return any(fnmatch(name, pattern) for pattern in HUB_FILES)
