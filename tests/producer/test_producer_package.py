"""The package as a whole: light, narrow, typed."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import producer
from producer.request import Sampling
from producer.wire import GenerateRequest

ROOT = Path(__file__).parents[2]
HEAVY = {"jax", "jaxlib", "flax", "numpy", "transformers", "tokenizers", "torch", "engine", "worker", "rich"}


def test_importing_it_loads_nothing_heavy() -> None:
    code = "import producer, sys; print('\\n'.join(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    loaded = {name.partition(".")[0] for name in run.stdout.split()}
    assert "producer" in loaded
    assert not loaded & HEAVY


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
    assert (Path(producer.__file__).parent / "py.typed").exists()


def test_the_errors_are_one_tree_and_drawn_whole() -> None:
    from producer import errors

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
