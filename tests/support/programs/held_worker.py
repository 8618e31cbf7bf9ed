"""`penstock worker`, held in the middle of a reply while a file is there. Usage: held_worker.py FILE worker ..."""

from __future__ import annotations

import sys
import time
from collections import Counter
from pathlib import Path

from penstock.cli import main
from penstock.engine import Engine, Output

NUM_TOKENS = 8


def hold(file: Path) -> None:
    """Has engines give nothing while the file is there, once they gave a few tokens of a request newer than it.

    Replies that were there before, which somebody may have left, do not count.
    """
    step = Engine.step
    seen: set[str] = set()  # requests, until the file was made
    num_tokens: Counter[str] = Counter()  # of requests that came later
    since = None

    def held(engine: Engine) -> list[Output]:
        nonlocal since
        if (now := _made_at(file)) != since:
            seen.update(num_tokens)
            num_tokens.clear()
            since = now
        if max(num_tokens.values(), default=0) >= NUM_TOKENS and file.exists():
            time.sleep(0.005)
            return []  # the driver hands over what it has between steps
        outputs = step(engine)
        for output in outputs:
            if output.request_id not in seen:
                num_tokens[output.request_id] += len(output.token_ids)
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
