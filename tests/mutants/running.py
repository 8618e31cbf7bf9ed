"""Runs tests in a copy of the repository, in a process of their own."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Literal, TypeAlias

from tests.support.packages import ROOT

Verdict: TypeAlias = Literal["passed", "failed", "hung", "broken"]
_VERDICTS: dict[int, Verdict] = {0: "passed", 1: "failed"}  # by pytest's exit status; others: the tests did not run
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class TestRun:
    __test__ = False

    verdict: Verdict
    output: str

    @property
    def failed_test(self) -> str:
        """The first test that failed; empty if none did."""
        found = _FAILED.search(self.output)
        return found[1] if found else ""


@contextmanager
def copied_tree() -> Iterator[Path]:
    """Copies all that git tracks or would track, as it is in the working tree, with the links of `penstock/`."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    with TemporaryDirectory(prefix="penstock-mutants-") as folder:
        for name in filter(None, listed.stdout.decode().split("\0")):
            source, target = ROOT / name, Path(folder) / name
            if source.is_symlink() or source.is_file():  # not if it was deleted since
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, target, follow_symlinks=False)
        yield Path(folder)


def run_tests(tree: Path, tests: Sequence[str], *, markers: str = "", limit_s: float | None = None) -> TestRun:
    """Runs tests of a copy until the first failure.

    Args:
        tree: the copy; its packages go before the installed ones.
        tests: files or node ids.
        markers: expression that chooses among them by their markers.
        limit_s: when to end a run that hangs, with all its processes.
    """
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-ra", "--tb=line", "-p", "no:cacheprovider", "-m", markers]
    with TemporaryFile("w+") as output:
        process = subprocess.Popen(
            [*command, *tests],
            cwd=tree,
            env=_environment(tree),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            verdict = _VERDICTS.get(process.wait(limit_s), "broken")
        except subprocess.TimeoutExpired:
            verdict = "hung"
        finally:
            _end(process)
        output.seek(0)
        return TestRun(verdict, output.read())


def _environment(tree: Path) -> dict[str, str]:
    """Returns the environment without what an outer pytest set: its options would change what a failure is."""
    outer = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "COV_"))}
    return {**outer, "PYTHONPATH": str(tree)}


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends what is left of a run: servers that its tests started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()
