"""`penstock bench compare`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from penstock.cli.bench.run import require_folders
from penstock.cli.shared.errors import USAGE, CommandFailed
from penstock.local.console import console
from penstock.tools.bench.comparing.comparison import Comparison, compare
from penstock.tools.bench.comparing.table import as_table, interval_text
from penstock.tools.bench.errors import BadResult, NotComparable
from penstock.tools.bench.result_file import read_result


def compare_files(
    files: Sequence[Path], *, anyway: bool, fail_above: float | None, json_path: Path | None, plot: Path | None
) -> None:
    """Shows the comparison, and writes the files that were asked for.

    Raises:
        CommandFailed: a file is not a result, they cannot be compared, or a figure is worse by more than `fail_above`
            percent.
    """
    if fail_above is not None and not fail_above >= 0:
        raise CommandFailed(f"--fail-above must be 0 or more, not {fail_above:g}", USAGE)
    if len(files) % 2:
        raise CommandFailed(
            f"{len(files)} files do not form pairs: give FIRST SECOND of each pair, in the order of the runs", USAGE
        )
    require_folders(json=json_path, plot=plot)
    try:
        results = [read_result(file) for file in files]
        found = compare(*zip(results[::2], results[1::2], strict=True), anyway=anyway)
    except NotComparable as error:
        raise CommandFailed(f"{error}; --anyway compares them", USAGE) from error
    except BadResult as error:
        raise CommandFailed(str(error), USAGE) from error
    console().print(as_table(found))
    if json_path is not None:
        json_path.write_text(json.dumps(found.to_json(), indent=1) + "\n")
    if plot is not None:
        from penstock.tools.bench.plot import write_comparison  # needs matplotlib

        write_comparison(found, plot)
    if fail_above is not None:
        _require_no_worse(found, fail_above)


def _require_no_worse(found: Comparison, percent: float) -> None:
    if not any(row.interval for row in found.rows):
        told = "no figure has an interval; measure more requests, or --repeats"
        raise CommandFailed(f"--fail-above {percent:g}: {told}", USAGE)
    if worse := found.worse_by(percent / 100):
        told = "; ".join(f"{row.figure.name} {interval_text(row)}" for row in worse)
        raise CommandFailed(f"worse by more than {percent:g} %: {told}")
