"""`penstock pull`: fetches a model, lists what was fetched, and deletes it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.engine.demo import MODEL_DIR
from penstock.engine.loading.naming import cache
from tests.cli.cli_process import command

URL = "https://models.invalid/m.gguf"


@pytest.fixture
def fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model that was fetched from a URL before."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with cache.being_fetched(URL) as folder:
        file = folder / "m.gguf"
        file.write_bytes(b"x" * 1000)
        return cache.keep(folder, URL, file)


def test_what_is_here_is_named_and_not_fetched_again(fetched: Path) -> None:
    outcome = command("pull", URL)
    assert (outcome.status, outcome.out) == (0, f"{fetched}\n")
    assert outcome.err == ""
    assert json.loads(command("pull", "demo", "--json").out) == {"model": "demo", "path": str(MODEL_DIR)}


def test_the_cache_is_listed_and_cleared(fetched: Path) -> None:
    [listed] = command("pull", "--list", "--json").out.splitlines()
    assert json.loads(listed) == {"model": URL, "path": str(fetched), "bytes": 1000}
    titles, row = command("pull", "--list").out.splitlines()
    assert (titles.split(), row.split()) == (["model", "size", "path"], [URL, "1.0", "kB", str(fetched)])
    assert command("pull", URL, "--remove").out.startswith(f"removed {URL}: 1.")
    assert not fetched.exists()
    gone = command("pull", URL, "--remove")
    assert (gone.status, gone.err) == (1, f"penstock: {URL} is not in the cache: penstock pull --list shows what is\n")


@pytest.mark.parametrize("arguments", [(), ("demo", "--list"), ("--list", "--remove"), ("--remove",)])
def test_it_is_told_what_to_do(arguments: tuple[str, ...]) -> None:
    outcome = command("pull", *arguments)
    assert (outcome.status, "name a MODEL to fetch" in outcome.err) == (2, True)


@pytest.mark.parametrize("model", ["no-such-model", "/nope", "./nope/m.gguf"])
def test_what_cannot_be_fetched_is_refused_at_once(model: str) -> None:
    outcome = command("pull", model)
    assert (outcome.status, outcome.out) == (1, "")
    assert outcome.err.startswith(f"penstock: there is no directory {model}, and it is not a hub id either")
