"""The name under which Penstock is installed, and what to say and refuse about it."""

from __future__ import annotations

from pathlib import Path

DISTRIBUTION = "penstock-llm"
"""The distribution's name. On PyPI, `penstock` is another project; the package and the command are called so here."""

IS_PUBLISHED = False
"""Whether an index has it. Until then it is installed from a clone."""


def how_to_install(extras: str) -> str:
    """Returns the command that installs it with these extras, such as `worker,tpu`."""
    return f"pip install '{DISTRIBUTION}[{extras}]'" if IS_PUBLISHED else f"pip install '.[{extras}]' in a clone"


def refuse_shadowed(packages: Path | None = None) -> None:
    """Refuses to run beside the other `penstock`: both install into one folder, and each overwrites files of the other.

    Raises:
        ImportError: another distribution of that name is installed there; the message says how to mend it.
    """
    folder = packages or Path(__file__).parent.parent
    other = next(folder.glob("penstock-[0-9]*.dist-info"), None)
    if other is not None:
        name = other.name.removesuffix(".dist-info")
        raise ImportError(
            f"{name} is installed in {folder} beside {DISTRIBUTION}, and overwrites its files: pip uninstall penstock "
            f"{DISTRIBUTION}, then install {DISTRIBUTION} again"
        )
