"""The package as a whole: light, narrow, typed."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import penstock
from penstock import producer
from penstock.producer.request import Sampling
from penstock.producer.wire import GenerateRequest

ROOT = Path(__file__).parents[2]
HEAVY = {"jax", "jaxlib", "flax", "numpy", "transformers", "tokenizers", "torch", "rich"}


def test_importing_it_loads_nothing_heavy() -> None:
    code = "import penstock.producer, sys; print('\\n'.join(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    loaded = run.stdout.split()
    assert "penstock.producer" in loaded
    assert not {name.partition(".")[0] for name in loaded} & HEAVY
    assert not [name for name in loaded if name.startswith(("penstock.engine", "penstock.worker"))]


def test_everything_is_loaded_once_under_the_installed_name() -> None:
    """From the repository's root the folders can be imported by their bare names too: as second copies."""
    code = (
        "import pkgutil, penstock, sys\n"
        "for module in pkgutil.walk_packages(penstock.__path__, 'penstock.'):\n"
        "    module.name.endswith('__main__') or __import__(module.name)\n"
        "print('\\n'.join(sys.modules))"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    loaded = run.stdout.split()
    assert {"penstock.producer.client", "penstock.engine.engine", "penstock.worker.service"} <= set(loaded)
    assert [name for name in loaded if name.partition(".")[0] in ("producer", "engine", "worker")] == []


def test_the_package_gives_what_the_producer_gives() -> None:
    assert sorted(penstock.__all__) == sorted(producer.__all__)
    assert all(getattr(penstock, name) is getattr(producer, name) for name in penstock.__all__)


def test_the_public_names_are_these() -> None:
    assert sorted(producer.__all__) == [
        "AsyncClient",
        "Chunk",
        "Client",
        "ConnectionLost",
        "GenerateRequest",
        "NotDurable",
        "PenstockError",
        "QueueFull",
        "Reply",
        "ReplyCorrupt",
        "ReplyGone",
        "ReplyTimeout",
        "RequestFailed",
        "RequestRefused",
        "ServerRefused",
    ]
    assert all(hasattr(producer, name) for name in producer.__all__)
    assert (Path(penstock.__file__).parent / "py.typed").exists()


def test_the_errors_are_one_tree_and_drawn_whole() -> None:
    from penstock.producer import errors

    names = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)}
    for name in names:
        assert issubclass(getattr(errors, name), errors.PenstockError)
        assert name in (errors.__doc__ or "")


def test_every_field_of_a_request_can_be_passed_beside_a_prompt() -> None:
    of_the_prompt = {"v", "prompt", "messages", "prompt_token_ids"}
    assert set(Sampling.__annotations__) == set(GenerateRequest.model_fields) - of_the_prompt


def test_it_asks_for_the_python_it_needs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == ">=3.11"
