"""Every mutant can still be made, and its killers are there; what is said of a run is true."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

from tests.mutants.mutant import Mutant
from tests.mutants.running import copied_tree, run_tests
from tests.mutants.table import MUTANTS
from tests.support.packages import ROOT


@cache
def names_in(file: str) -> frozenset[str]:
    """Returns the names of the tests that a file has at its top level."""
    nodes = ast.parse((ROOT / file).read_text()).body
    return frozenset(node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def is_there(killer: str) -> bool:
    file, _, name = killer.partition("::")
    return (ROOT / file).is_file() and (not name or name in names_in(file))


def is_code(mutant: Mutant) -> bool:
    """Checks that what a mutant leaves of a Python file compiles: other mistakes are not slips."""
    text = mutant.mutated((ROOT / mutant.file).read_text())
    if mutant.file.endswith(".py"):
        compile(text, mutant.file, "exec")
    return bool(text)


def test_every_mutant_applies_and_has_killers() -> None:
    assert all(map(is_code, MUTANTS))
    assert [each.name for each in MUTANTS if not each.killers or each.old == each.new] == []
    assert [killer for each in MUTANTS for killer in each.killers if not is_there(killer)] == []
    assert len({each.name for each in MUTANTS}) == len(MUTANTS)


def test_a_mutant_that_no_longer_applies_is_named() -> None:
    mutant = Mutant("late", "it is early", "order.py", "a < b", "a <= b", ())
    for text in ("a > b", "a < b and a < b"):
        with pytest.raises(ValueError, match="late: 'a < b' stands"):
            mutant.mutated(text)


def test_a_copy_has_the_links_and_a_mutant_leaves_it_as_it_was() -> None:
    mutant = MUTANTS[0]
    text = (ROOT / mutant.file).read_text()
    with copied_tree() as tree:
        linked = tree / "penstock" / mutant.file
        with mutant.applied(tree):
            assert linked.read_text() == mutant.mutated(text)
        assert linked.read_text() == text
    assert (ROOT / mutant.file).read_text() == text


def test_what_a_run_comes_to(tmp_path: Path) -> None:
    (tmp_path / "test_fail.py").write_text("def test_late():\n    assert False\n")
    (tmp_path / "test_hang.py").write_text("import time\n\ndef test_late():\n    time.sleep(1000)\n")
    run = run_tests(tmp_path, ["test_fail.py"])
    assert (run.verdict, run.failed_test) == ("failed", "test_fail.py::test_late")
    assert run_tests(tmp_path, ["test_hang.py"], limit_s=1).verdict == "hung"
    assert run_tests(tmp_path, ["test_missing.py"]).verdict == "broken"
