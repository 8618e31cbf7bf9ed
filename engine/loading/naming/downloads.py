"""GGUF files from the web, streamed to disk. A download that was cut off is resumed."""

from __future__ import annotations

import re
from http import HTTPStatus
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.parse import unquote, urldefrag, urlsplit
from urllib.request import Request, urlopen

from penstock.engine.errors import CheckpointError
from penstock.engine.loading.gguf.parts import names_of_parts
from penstock.engine.loading.naming.cache import fetched_once
from penstock.engine.loading.naming.digests import check_digest, stated_digest
from penstock.engine.loading.source import GGUF_SUFFIX
from penstock.engine.progress import ReportProgress

TIMEOUT_S = 30.0
TRIES = 5
CHUNK_BYTES = 1 << 18
_RANGE = re.compile(r"bytes (\d+)-\d+/(\d+)")


def is_url(model: str) -> bool:
    """Whether a model is named by a URL."""
    return model.startswith(("https://", "http://"))


def fetch_url(url: str, report: ReportProgress) -> Path:
    """Returns the file of a URL, from the cache if it was fetched before; of a model in several files, a folder with
    all of them.

    Raises:
        CheckpointError: the URL names no GGUF file, the server does not deliver it, or its digest is another.
    """
    address, fragment = urldefrag(url)
    if not _name(address).endswith(GGUF_SUFFIX):
        raise CheckpointError(f"{_shown(address)} does not name a file that ends in {GGUF_SUFFIX}")
    split = urlsplit(address)
    addresses = [split._replace(path=path).geturl() for path in names_of_parts(split.path)]
    is_one_file = len(addresses) == 1
    digest = stated_digest(fragment, _shown(address), is_one_file=is_one_file)

    def fetch(folder: Path) -> Path:
        place = folder if is_one_file else folder / "model"
        place.mkdir(exist_ok=True)
        begun = [place / f"{_name(each)}.part" for each in addresses]
        for each, file in zip(addresses, begun, strict=True):
            _stream(each, file, report)
        if digest is not None:
            check_digest(begun[0], digest, _shown(address))
        files = [file.replace(file.with_suffix("")) for file in begun]
        return files[0] if is_one_file else place

    return fetched_once(url, fetch)


def _name(address: str) -> str:
    return Path(unquote(urlsplit(address).path)).name


def _stream(address: str, part: Path, report: ReportProgress) -> None:
    """Appends to the file until it is whole.

    Raises:
        CheckpointError: the server refuses, or breaks off again and again.
    """
    error: Exception | None = None
    for _ in range(TRIES):
        try:
            if _is_whole_after_one(address, part, report):
                return
        except HTTPError as refused:
            if refused.code != HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
                raise CheckpointError(
                    f"{_shown(address)} can't be fetched: the server answered {refused.code}"
                ) from refused
            if refused.headers.get("Content-Range") == f"bytes */{_size(part)}":
                return
            part.unlink(missing_ok=True)  # the file has become shorter
        except (URLError, HTTPException, ConnectionError, TimeoutError, ValueError) as broken:
            error = broken
        except OSError as unwritten:
            raise CheckpointError(f"{part} can't be written: {unwritten}") from unwritten
    raise CheckpointError(f"{_shown(address)} can't be fetched: {error or 'the server breaks off'}") from error


def _is_whole_after_one(address: str, part: Path, report: ReportProgress) -> bool:
    """Fetches what is missing, as far as it comes."""
    have = _size(part)
    headers = {"Accept-Encoding": "identity", **({"Range": f"bytes={have}-"} if have else {})}
    with urlopen(Request(address, headers=headers), timeout=TIMEOUT_S) as answer:  # noqa: S310  `is_url` knows it
        span = _RANGE.fullmatch(answer.headers.get("Content-Range", ""))
        goes_on = answer.status == HTTPStatus.PARTIAL_CONTENT and span is not None and int(span[1]) == have
        length = answer.headers.get("Content-Length")
        total = int(span[2]) if goes_on and span is not None else int(length) if length is not None else None
        done = have if goes_on else 0
        with part.open("ab" if goes_on else "wb") as file:
            while chunk := answer.read(CHUNK_BYTES):
                file.write(chunk)
                done += len(chunk)
                report(done, total or done, part.name.removesuffix(".part"))
    return total is None or done == total


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _shown(address: str) -> str:
    """Returns an address without its query and user, which may hold a secret."""
    parts = urlsplit(address)
    return f"{parts.scheme}://{parts.hostname}{'' if parts.port is None else f':{parts.port}'}{parts.path}"
