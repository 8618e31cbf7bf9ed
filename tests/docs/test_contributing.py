"""The recipes of CONTRIBUTING.md name exactly the files that everything of the kind has today."""

from __future__ import annotations

import ast
import inspect
import pkgutil
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest
import typer
from starlette.routing import Route

from docs.scripts.pages import ROOT, all_pages, page
from penstock.cli import app
from penstock.engine.models import FAMILIES, Family, families
from penstock.gateway.app import create_app
from penstock.gateway.settings import GatewaySettings
from penstock.parameters import SamplingParameters, declared
from penstock.protocol import scripts
from tests.support.packages import PACKAGES

PLACEHOLDER = re.compile(r"<(\w+)>")
LOADED = re.compile(r'^(_\w+) = load\("penstock\.protocol\.scripts", "(\w+)/(\w+)"\)$', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Recipe:
    always: tuple[str, ...]
    sometimes: tuple[str, ...]  # rows that begin with "if"

    def files(self, names: Mapping[str, str]) -> list[str]:
        """Returns what such a change always touches, with these names in the places of the placeholders."""
        return [PLACEHOLDER.sub(lambda found: names[found[1]], each) for each in self.always]


@cache
def recipe(heading: str) -> Recipe:
    rows = [(row[0].codes[0], row[1].text.startswith("if ")) for row in page("CONTRIBUTING.md").table(heading)]
    return Recipe(tuple(file for file, may in rows if not may), tuple(file for file, may in rows if may))


def missing(files: Iterable[str]) -> list[str]:
    return [file for file in files if not (ROOT / file).exists()]


@pytest.mark.parametrize("heading", ["A model family", "A command", "A script", "A route", "A request parameter"])
def test_a_recipe_s_files_are_there(heading: str) -> None:
    wanted = recipe(heading)
    assert wanted.always
    assert missing(file for file in (*wanted.always, *wanted.sometimes) if not PLACEHOLDER.search(file)) == []


def family_modules() -> dict[str, str]:
    """Returns the module of each family, by its `model_type`."""
    found: dict[str, str] = {}
    for module in pkgutil.iter_modules(families.__path__):
        for value in vars(import_module(f"{families.__name__}.{module.name}")).values():
            if isinstance(value, Family) and FAMILIES.get(value.model_type) is value:
                found[value.model_type] = module.name
    return found


def strings(path: str) -> frozenset[str]:
    nodes = ast.walk(ast.parse((ROOT / path).read_text()))
    return frozenset(node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str))


def test_every_family_is_where_the_recipe_says() -> None:
    wanted, modules = recipe("A model family"), family_modules()
    assert modules.keys() == FAMILIES.keys()
    assert [file for name in modules.values() for file in missing(wanted.files({"name": name}))] == []
    texts = {name for name, family in FAMILIES.items() if family.architecture.endswith("ForConditionalGeneration")}
    about = page("docs/models.md")
    assert {code for row in about.table("Families") for cell in row for code in cell.codes} == FAMILIES.keys()
    logits, tokens = (row[1] for row in about.table("What is tested")[:2])
    assert logits.text == "all families"
    assert set(tokens.codes) == texts
    assert tokens.text.startswith("all families but ")


def test_a_family_is_named_nowhere_else() -> None:
    """Otherwise a new one would have to be added there, too."""
    wanted = recipe("A model family")
    # Tokenizers of GGUF files and the random models of `penstock bench` have names that are a family's by chance.
    others = {"engine/loading/gguf/tokenizer.py", "tools/bench/presets.py"}
    naming = {
        path
        for package in PACKAGES
        for path in (str(path.relative_to(ROOT)) for path in (ROOT / package).rglob("*.py"))
        if not path.startswith("engine/models/families/") and strings(path) & FAMILIES.keys()
    }
    assert naming - others == {
        file for file in wanted.sometimes if not file.startswith(("tests/", "engine/models/families/"))
    }


def test_every_command_is_where_the_recipe_says() -> None:
    wanted = recipe("A command")
    commands = set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]  # of a click that is typer's own
    grouped = {"bench"}  # so many subcommands that they have a folder, and their tests a file each
    for name in sorted(commands - grouped):
        assert missing(wanted.files({"name": name})) == []
    assert missing(f"cli/{name}/commands.py" for name in grouped) == []
    modules = {found.name for found in pkgutil.iter_modules([str(ROOT / "cli")]) if not found.ispkg}
    assert modules == commands - grouped
    text = "\n".join((ROOT / name).read_text() for name in all_pages())
    assert [name for name in sorted(commands) if not re.search(rf"penstock {name}\b", text)] == []


def workers_scripts() -> Iterator[tuple[str, str, str]]:
    """Yields the module, the name and the constant of each script of workers."""
    for path in sorted((ROOT / "protocol/scripts").glob("*.py")):
        for constant, noun, script in LOADED.findall(path.read_text()):
            if (path.stem, noun, script) != ("lanes", "calls", "retire"):  # whose caller retires from either stream
                assert noun == path.stem
                yield noun, script, constant


def test_every_script_is_where_the_recipe_says() -> None:
    wanted, found = recipe("A script"), list(workers_scripts())
    assert len(found) > 30
    for noun, script, constant in found:
        assert missing(wanted.files({"noun": noun, "script": script})) == []
        module = import_module(f"{scripts.__name__}.{noun}")
        calling = {
            name
            for name, function in vars(module).items()
            if inspect.isfunction(function) and constant in function.__code__.co_names
        }
        assert calling, (noun, script)
        assert any(getattr(scripts, name, None) is getattr(module, name) for name in calling), (noun, script)
        head = (ROOT / f"protocol/scripts/lua/{noun}/{script}.lua").read_text().partition("\n\n")[0]
        assert re.search(r"^-- KEYS(:| and)", head, re.MULTILINE), (noun, script)


def routes() -> list[Route]:
    """Returns the routes of the APIs: without probes, pages, and what is refused with an explanation."""
    found = [route for route in create_app(GatewaySettings()).routes if isinstance(route, Route)]
    apart = ("health", "openai.unserved", "openapi.routes", "page.routes")
    return [route for route in found if route.endpoint.__module__.removeprefix("penstock.gateway.") not in apart]


def test_every_route_is_where_the_recipe_says() -> None:
    wanted = recipe("A route")
    told = {
        code
        for name in ("docs/gateway.md", "docs/top.md")
        for code in (span.target.partition("?")[0] for span in page(name).spans)
    }
    tests = "\n".join(path.read_text() for path in (ROOT / "tests/gateway").rglob("*.py"))
    assert len(routes()) > 20
    for route in routes():
        _, _, api, handler = route.endpoint.__module__.split(".")
        assert missing(wanted.files({"api": api, "handler": handler})) == []
        assert route in import_module(f"penstock.gateway.{api}.routes").ROUTES
        shown = re.sub(r"{(?:\w+_)?(\w+)(?::\w+)?}", lambda found: found[1].upper(), route.path)
        for method in (route.methods or set()) - {"HEAD"}:
            assert f"{method} {shown}" in told
        assert route.path.partition("{")[0] in tests


def words(path: Path) -> frozenset[str]:
    return frozenset(re.findall(r"\w+", path.read_text()))


def test_every_parameter_is_where_the_recipe_says() -> None:
    wanted = recipe("A request parameter")
    assert len(wanted.always) <= 5
    for file in wanted.always:
        if not file.startswith("tests/"):
            assert declared(SamplingParameters).keys() <= words(ROOT / file), f"{file}; `make docs` writes docs/wire.md"


def test_a_parameter_is_named_nowhere_else() -> None:
    """One that no API has a rule of its own for, as most new ones."""
    wanted = recipe("A request parameter")
    folders = (*PACKAGES, "benchmarks")
    paths = [*(ROOT / "penstock").glob("*.py"), *(path for name in folders for path in (ROOT / name).rglob("*.py"))]
    naming = {str(path.relative_to(ROOT)) for path in paths if "min_p" in words(path)}
    assert naming <= {*wanted.always, *wanted.sometimes}
    assert naming >= {file for file in wanted.always if file.endswith(".py") and not file.startswith("tests/")}
