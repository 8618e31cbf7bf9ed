"""`penstock worker`, held in the middle of a reply while a file is there. Usage: held_worker.py FILE worker ..."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from penstock.cli import main
from penstock.engine import Engine, Output

NUM_TOKENS = 8


def hold(file: Path) -> None:
    """Has engines wait for the end of the file once they have given a few tokens while it was there."""
    step = Engine.step
    num_tokens, since = 0, None

    def held(engine: Engine) -> list[Output]:
        nonlocal num_tokens, since
        if (now := _made_at(file)) != since:
            num_tokens, since = 0, now
        while num_tokens >= NUM_TOKENS and file.exists():
            time.sleep(0.005)
        outputs = step(engine)
        num_tokens += sum(len(output.token_ids) for output in outputs)
        return outputs

    Engine.step = held  # type: ignore[method-assign, assignment]


def _made_at(file: Path) -> int | None:
    try:
        return file.stat().st_mtime_ns
    except FileNotFoundError:
        return None


if __name__ == "__main__":
    hold(Path(sys.argv.pop(1)))
    main()
