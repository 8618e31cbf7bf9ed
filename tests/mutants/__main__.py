"""`python -m tests.mutants [NAME ...]`: makes each slip in a copy, and says which ones no test notices.

The killers first run without any slip, and must pass. The exit status is 1 if they do not, or if a mutant survives.
"""

from __future__ import annotations

import sys
import time
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path

from tests.mutants.mutant import Mutant
from tests.mutants.running import TestRun, copied_tree, run_tests
from tests.mutants.table import MUTANTS
from tests.support.patience import PATIENCE

LIMIT_S = 300 * PATIENCE  # for the killers of one mutant
_SHOWN_LINES = 30
_WORDS = {"passed": "SURVIVED", "failed": "killed", "hung": "killed: the time limit ended it", "broken": "BROKEN"}


def main(arguments: Sequence[str]) -> int:
    parser = ArgumentParser(prog="python -m tests.mutants", description="Makes slips, and runs what must notice them.")
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("-m", dest="markers", default="", help="as pytest's: which of the killers run")
    chosen = parser.parse_args(arguments)
    if unknown := set(chosen.names) - {each.name for each in MUTANTS}:
        parser.error(f"no mutant has the name {', '.join(sorted(unknown))}")
    mutants = [each for each in MUTANTS if not chosen.names or each.name in chosen.names]
    with copied_tree() as tree:
        if not _all_pass(tree, mutants, chosen.markers):
            return 1
        survivors = [each for each in mutants if not _is_killed(tree, each, chosen.markers)]
    _say(f"{len(mutants) - len(survivors)} of {len(mutants)} mutants were killed")
    for each in survivors:
        _say(f"not killed: {each.name} ({each.breaks}), {each.file}")
    return int(bool(survivors))


def _all_pass(tree: Path, mutants: Sequence[Mutant], markers: str) -> bool:
    killers = list(dict.fromkeys(test for each in mutants for test in each.killers))
    _say(f"running what kills {len(mutants)} mutants, without a mutant")
    run = run_tests(tree, killers, markers=markers)
    if run.verdict != "passed":
        _say(f"{_end_of(run)}\nthese tests fail without a mutant: nothing was tried")
    return run.verdict == "passed"


def _is_killed(tree: Path, mutant: Mutant, markers: str) -> bool:
    began_s = time.monotonic()
    with mutant.applied(tree):
        run = run_tests(tree, mutant.killers, markers=markers, limit_s=LIMIT_S)
    by = f" by {run.failed_test}" if run.verdict == "failed" else ""
    _say(f"{mutant.name}: {_WORDS[run.verdict]}{by}, {time.monotonic() - began_s:.0f} s")
    if run.verdict == "broken":
        _say(_end_of(run))
    return run.verdict in ("failed", "hung")


def _end_of(run: TestRun) -> str:
    return "\n".join(run.output.splitlines()[-_SHOWN_LINES:])


def _say(text: str) -> None:
    print(text, flush=True)  # noqa: T201  it is its output


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
