"""Models in an object store, `s3://` or `gs://`: one GGUF file, or the folder of a checkpoint."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any
from urllib.parse import urldefrag

from penstock.engine.errors import CheckpointError
from penstock.engine.loading.gguf.parts import names_of_parts
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
    is_one_file = address.endswith(GGUF_SUFFIX) and len(names_of_parts(address)) == 1
    digest = stated_digest(fragment, address, is_one_file=is_one_file)

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
    if root.endswith(GGUF_SUFFIX):
        names = names_of_parts(root)
    else:
        names = [each for each in store.ls(root, detail=False) if _is_wanted(Path(each).name)]
    if not names:
        raise CheckpointError(f"{root} has no files of a checkpoint")
    is_one_file = names == [root]
    place = folder if is_one_file else folder / "model"
    place.mkdir(exist_ok=True)
    sizes = [store.size(name) for name in names]
    done, begun = 0, []
    for name, size in zip(names, sizes, strict=True):
        before, total = done, sum(sizes)
        begun.append(_stream(store, name, size, place, lambda have, what: report(before + have, total, what)))  # noqa: B023  called at once
        done += size
    if digest is not None:
        check_digest(begun[0], digest, root)
    files = [part.replace(place / Path(name).name) for part, name in zip(begun, names, strict=True)]
    return files[0] if is_one_file else place


def _stream(store: Any, name: str, size: int, place: Path, tell: Any) -> Path:
    """Fetches one file, from where an earlier try at the same version of it stopped. Returns it, under a name of that
    version.
    """
    version = hashlib.sha256(str(store.ukey(name)).encode()).hexdigest()[:12]
    part = place / f"{Path(name).name}.{version}.part"
    have = part.stat().st_size if part.exists() else 0
    with store.open(name, "rb") as source, part.open("ab") as out:
        source.seek(have)
        while chunk := source.read(CHUNK_BYTES):
            out.write(chunk)
            have += len(chunk)
            tell(have, Path(name).name)
    if have != size:
        part.unlink()
        raise CheckpointError(f"{name} came with {have} bytes, and has {size}")
    return part


def _is_wanted(name: str) -> bool:
    return any(fnmatch(name, pattern) for pattern in HUB_FILES)
