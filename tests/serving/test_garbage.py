from __future__ import annotations

import subprocess
import sys

from tests.support.patience import WAIT_S

SETTLE = """
import gc
from penstock.serving import garbage
class Node: pass
kept = [Node() for _ in range(1000)]
lost = Node(); lost.me = lost; del lost
garbage.settle()
assert gc.get_freeze_count() > 1000, gc.get_freeze_count()
assert not any(isinstance(each, Node) for each in gc.get_objects())
assert gc.get_threshold()[0] >= 10_000
"""


def test_what_was_loaded_is_not_walked_again_and_what_was_lost_is_freed() -> None:
    subprocess.run([sys.executable, "-c", SETTLE], check=True, timeout=WAIT_S)
