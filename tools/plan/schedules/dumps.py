"""Compiles in a process of its own, with libtpu told to dump the schedules of what it compiles."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from penstock.engine.execution.compilation import no_kept_compilations
from penstock.tools.plan.schedules.bundles import ScheduleError
from penstock.tools.plan.schedules.schedule import Schedule

_NAME = re.compile(r"\d+-(.+?)(?:\.\d+)?-\d+-final_bundles\.txt")


def compiled_schedules(compile_it: Callable[..., Any], *arguments: Any) -> list[Schedule]:
    """Calls `compile_it` in another process, and returns the schedules of everything that it compiled there.

    A function of a module and arguments that can be pickled: libtpu reads its options when it loads, and only then.
    Names are of XLA's instructions, so those of Pallas kernels begin with their `name`.

    Raises:
        ScheduleError: libtpu dumped nothing.
    """
    with TemporaryDirectory() as folder:
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            pool.submit(_compile, folder, compile_it, *arguments).result()
        found = sorted(Path(folder).glob("*-final_bundles.txt"))
        texts = [(match[1], path) for path in found if (match := _NAME.fullmatch(path.name))]
        if not texts:
            raise ScheduleError("libtpu dumped no schedule: nothing was compiled, or it was kept from before")
        return [Schedule.of(name, path.read_text(encoding="utf-8")) for name, path in texts]


def _compile(folder: str, compile_it: Callable[..., Any], *arguments: Any) -> None:
    os.environ["LIBTPU_INIT_ARGS"] = " ".join(
        [
            os.environ.get("LIBTPU_INIT_ARGS", ""),
            f"--xla_jf_dump_to={folder}",
            "--xla_jf_dump_llo_text=true",
            "--xla_jf_dump_llo_pass_label_regex=.*final_bundles.*",
        ]
    ).strip()
    with no_kept_compilations():
        compile_it(*arguments)
