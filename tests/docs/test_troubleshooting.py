"""docs/troubleshooting.md names everything that the code logs or raises, and nothing else."""

from __future__ import annotations

import inspect
import re

import pytest

import penstock
from docs.scripts.pages import Cell, page
from penstock.worker import errors
from tests.docs import source_words

PAGE = page("docs/troubleshooting.md")


def column(heading: str, place: int = 0) -> set[str]:
    """Returns the inline code of one column of the table under a heading."""
    return {code for row in PAGE.table(heading) for code in row[place].codes}


def test_every_exception_of_the_client_is_there() -> None:
    raised = {
        name
        for name in penstock.__all__
        if inspect.isclass(kind := getattr(penstock, name))
        and issubclass(kind, penstock.PenstockError)
        and kind is not penstock.PenstockError
    }
    assert column("The client library raises") == raised


def test_every_code_of_an_end_is_there() -> None:
    told = {code for row in page("docs/wire.md").table("Error codes") for code in row[0].codes}
    assert column("A reply ends with error") == told
    assert source_words.unsaid(told, "engine", "worker", "protocol", "producer") == set()


def test_codes_of_the_gateway_are_its_own() -> None:
    told = {code for row in page("docs/gateway.md").table("Errors") for code in row[1].codes}
    assert source_words.unsaid(told, "gateway", "producer", "protocol", "serving") == set()


def test_every_exit_status_is_there() -> None:
    statuses = {
        name: kind.exit_status
        for name, kind in vars(errors).items()
        if inspect.isclass(kind) and issubclass(kind, errors.WorkerError) and kind is not errors.WorkerError
    }
    rows = PAGE.table("A worker does not start, or ends")
    told = {name: int(row[0].text) for row in rows for name in row[1].codes}
    assert {name: told.get(name) for name in statuses} == statuses


@pytest.mark.parametrize(
    ("folders", "place"),
    [(("worker", "cli", "local", "tools", "serving", "protocol/queue/junk.py"), 0), (("gateway", "serving"), 1)],
)
def test_every_warning_in_a_log_is_there(folders: tuple[str, ...], place: int) -> None:
    said = source_words.events(*folders)
    assert len(said) > 15
    told = [column_of(table) for table in tables_of_logs()]
    assert told[place] | (in_both() if place else set()) == said
    assert in_both() < told[0]


def tables_of_logs() -> tuple[list[list[Cell]], list[list[Cell]]]:
    return PAGE.table("What logs say"), PAGE.table("And of a gateway:")


def in_both() -> set[str]:
    """Returns the events of a worker that a gateway logs too."""
    (said,) = re.findall(r"^A gateway logs (.+) too\.$", PAGE.path.read_text(), re.MULTILINE)
    return set(re.findall(r"`(\w+)`", said))


def column_of(rows: list[list[Cell]]) -> set[str]:
    return {code for row in rows for code in row[0].codes}
