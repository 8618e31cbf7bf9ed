"""Writes into docs/models.md which models are tested, from the cases of the tests themselves: `make docs`."""

from __future__ import annotations

import ctypes
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from penstock.engine.attention.selection import attention_for
from penstock.engine.config import ATTENTION_SETTINGS
from penstock.engine.errors import ConfigError
from penstock.engine.kernels.cpu import NativeLibrary
from penstock.engine.loading.gguf.architectures import ARCHITECTURES
from penstock.engine.models import FAMILIES
from tests.engine.formats import test_quantized_checkpoints
from tests.engine.formats.quantized_weights import SCHEMES
from tests.engine.models import test_models_parity
from tests.engine.sharding import test_models_divided, test_quantized_parallel
from tests.engine.whole import test_engine_parity
from tests.support.packages import ROOT

DOCS = ROOT / "docs" / "models.md"
PLACE = re.compile(r"(<!-- Written by `make docs`[^>]*-->\n).*(<!-- Up to here\. -->)", re.DOTALL)

HOW = {
    "cpu": "run: everything on this page",
    "gpu": "kernels are run interpreted and compiled ahead of time; on a card by `make bench-gpu` ([gpu.md](gpu.md))",
    "tpu": "kernels are run interpreted; they and whole steps are compiled ahead of time by libtpu ([tpu.md](tpu.md))",
}


class _Compiled(NativeLibrary):
    """A native library as on a machine with a C++ compiler."""

    def load_for(self, name: str, setting: str) -> ctypes.CDLL | None:
        del name, setting
        return ctypes.CDLL(None)


LIBRARY = _Compiled(Path())


def page(text: str) -> str:
    """Returns `text` of the page with the tables as they must be."""
    tables = "\n".join(("", *_families(), "", *_formats(), "", *_platforms(), "", ""))
    written, count = PLACE.subn(lambda found: f"{found[1]}{tables}{found[2]}", text)
    assert count == 1, f"{DOCS.name} has no place for the tables"
    return written


def _families() -> Iterator[str]:
    logits, tokens = _counts(test_models_parity.CASES), _counts(test_engine_parity.MODELS)
    divided: dict[str, set[str]] = {}
    for layouts, config in test_models_divided.MODELS.values():
        for layout in layouts.split(","):
            divided.setdefault(layout, set()).add(str(config["family"]))
    quantized = _counts(test_quantized_parallel.MODELS) + _counts(test_quantized_checkpoints.OTHERS)
    quantized += _counts(test_engine_parity.QUANTIZED)
    few, many = min(logits.values()), max(logits.values())
    yield "| what agrees | in |"
    yield "| --- | --- |"
    yield f"| logits of {few} to {many} geometries, {logits.total()} in all | {_named(logits)} |"
    yield f"| 64 tokens, on one device and with tensors over two | {_named(tokens.keys() & divided['2'])} |"
    yield f"| experts over devices | {_named(divided['1x2'])} |"
    yield f"| quantized checkpoints | {_named(quantized)} |"


def _named(found: Iterable[str]) -> str:
    """Returns the families that were found, or those that were not where they are fewer."""
    there = set(found)
    has = [f"`{name}`" for name in FAMILIES if name in there]
    lacks = [f"`{name}`" for name in FAMILIES if name not in there]
    if not lacks:
        return "all families"
    return ", ".join(has) if len(has) <= len(lacks) else f"all families but {', '.join(lacks)}"


def _formats() -> Iterator[str]:
    methods: dict[str, list[str]] = {}
    for name, scheme in SCHEMES.items():
        methods.setdefault(str(scheme.fields["quant_method"]), []).append(name)
    yield "| format | variants that are loaded and held to their values |"
    yield "| --- | --- |"
    for method, names in methods.items():
        yield f"| `{method}` | {', '.join(names)} |"
    named = (
        f"`{name}`" if name == each.model_type else f"`{name}` (`{each.model_type}`)"
        for name, each in ARCHITECTURES.items()
    )
    yield f"| GGUF | architectures {', '.join(named)} |"


def _platforms() -> Iterator[str]:
    yield "| platform | attention that `auto` takes, and others | tested |"
    yield "| --- | --- | --- |"
    for platform, how in HOW.items():
        auto = type(attention_for("auto", platform, "bfloat16", LIBRARY)).__name__
        others = [setting for setting in ATTENTION_SETTINGS[1:] if _is_there(setting, platform)]
        yield f"| {platform} | {auto.removesuffix('Attention').lower()}; {', '.join(others)} | {how} |"


def _is_there(setting: str, platform: str) -> bool:
    with suppress(ConfigError):
        attention_for(setting, platform, "bfloat16", LIBRARY)
        return True
    return False


def _counts(cases: Mapping[str, Iterable[Any]]) -> Counter[str]:
    """Counts the cases of each family. A case is some values: a family by its name, or fields that may name one."""
    return Counter(_family(tuple(case)) for case in cases.values())


def _family(case: tuple[Any, ...]) -> str:
    fields = {name: value for part in case if isinstance(part, dict) for name, value in part.items()}
    named = [part for part in case if isinstance(part, str) and part in FAMILIES]
    return str(named[0] if named else fields.get("family", "qwen3"))


if __name__ == "__main__":
    DOCS.write_text(page(DOCS.read_text()))
