"""The package as a whole is light, narrow and typed."""

from __future__ import annotations

import builtins
import collections.abc
import re
import subprocess
import sys
import tomllib
import types
import typing
from dataclasses import is_dataclass
from inspect import get_annotations, isfunction
from pathlib import Path

import penstock
from penstock import producer
from penstock.protocol.wire import GenerateRequest, Sampling
from tests.support.packages import PACKAGES, ROOT

HEAVY = {"jax", "jaxlib", "flax", "numpy", "transformers", "tokenizers", "torch", "rich"}
STANDARD = {name for module in (builtins, collections.abc, types, typing) for name in dir(module)}


def test_importing_it_loads_nothing_heavy() -> None:
    code = "import penstock.producer, sys; print('\\n'.join(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    loaded = run.stdout.split()
    assert "penstock.producer" in loaded
    assert not {name.partition(".")[0] for name in loaded} & HEAVY
    assert not [name for name in loaded if name.startswith(("penstock.engine", "penstock.worker"))]


def test_everything_is_loaded_once_under_the_installed_name() -> None:
    """From the repository's root the folders can also be imported by their bare names, as second copies."""
    code = (
        "import pkgutil, penstock, sys\n"
        "for module in pkgutil.walk_packages(penstock.__path__, 'penstock.'):\n"
        "    module.name.endswith('__main__') or __import__(module.name)\n"
        "print('\\n'.join(sys.modules))"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    loaded = run.stdout.split()
    assert {"penstock.producer.blocking.client", "penstock.engine.engine", "penstock.worker.service"} <= set(loaded)
    assert [name for name in loaded if name.partition(".")[0] in PACKAGES] == []


def test_the_package_gives_what_the_producer_gives() -> None:
    assert sorted(penstock.__all__) == sorted(["__version__", *producer.__all__])
    assert all(getattr(penstock, name) is getattr(producer, name) for name in producer.__all__)
    assert dir(penstock) == sorted([*penstock.__all__, "LLM"])


def test_what_public_methods_take_and_return_is_public() -> None:
    """Users annotate with these types."""
    public = [getattr(penstock, name) for name in producer.__all__]
    named = {name for kind in public if isinstance(kind, type) for name in named_by(kind)}
    assert {"Prompt", "Sampling", "Handle", "BlockingReplyStream", "ProgressCallback", "TokenLogprob", "State"} <= named
    assert named - set(penstock.__all__) == set()


def named_by(kind: type) -> set[str]:
    """Returns our names in the annotations of what a caller reads from a `kind` or calls on it."""
    annotations = list(get_annotations(kind).values()) if is_dataclass(kind) else []
    for name, value in vars(kind).items():
        function = value.fget if isinstance(value, property) else value
        if isfunction(function) and not name.startswith("_"):
            annotations += get_annotations(function).values()
    words = {word for annotation in annotations for word in re.findall(r"\w+", annotation)}
    return (words & vars(sys.modules[kind.__module__]).keys()) - STANDARD


def test_the_public_names_are_these() -> None:
    assert sorted(producer.__all__) == [
        "AsyncClient",
        "BadAddress",
        "BlockingHandle",
        "BlockingReplyStream",
        "BulkProgress",
        "BulkResult",
        "CallFailed",
        "CallTimedOut",
        "Choice",
        "Chunk",
        "Client",
        "ConnectionLost",
        "FinishReason",
        "GenerateRequest",
        "Handle",
        "Message",
        "ModelCard",
        "NotDurable",
        "PenstockError",
        "Prefill",
        "ProgressCallback",
        "Prompt",
        "QueueFull",
        "QueueStatus",
        "Reply",
        "ReplyCorrupt",
        "ReplyGone",
        "ReplyStream",
        "ReplyTimeout",
        "RequestFailed",
        "RequestRefused",
        "RowIds",
        "Sampling",
        "ServerRefused",
        "State",
        "TelemetryUnavailable",
        "Timings",
        "TokenLogprob",
        "ToolCall",
        "ToolCallDelta",
        "TopLogprob",
        "UnknownRequest",
        "Usage",
    ]
    assert all(hasattr(producer, name) for name in producer.__all__)
    assert (Path(penstock.__file__).parent / "py.typed").exists()


def test_the_errors_are_one_tree_and_drawn_whole() -> None:
    from penstock.protocol import errors

    names = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)}
    for name in names:
        assert issubclass(getattr(errors, name), errors.PenstockError)
        assert name in (errors.__doc__ or "")


def test_every_field_of_a_request_can_be_passed_beside_a_prompt() -> None:
    of_the_prompt = {"v", "prompt", "messages", "prompt_token_ids"}
    of_openai = {"max_completion_tokens", "top_logprobs"}
    assert set(Sampling.__annotations__) - of_openai == set(GenerateRequest.model_fields) - of_the_prompt


def test_it_asks_for_the_python_it_needs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == ">=3.11"
