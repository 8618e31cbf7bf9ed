from __future__ import annotations

import pytest

from penstock import __version__
from tests.cli.cli_process import command


@pytest.mark.parametrize("argument", ["version", "--version"])
def test_version_is_that_of_the_package(argument: str) -> None:
    outcome = command(argument)
    assert (outcome.status, outcome.out, outcome.err) == (0, f"{__version__}\n", "")
