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

PAUSED = """
import gc
from penstock.serving import garbage
gc.set_threshold(10)
with garbage.paused():
    before = gc.get_stats()[0]["collections"]
    kept = [[] for _ in range(10_000)]
    assert gc.get_stats()[0]["collections"] == before
assert gc.isenabled() and gc.get_freeze_count() > 10_000
try:
    with garbage.paused():
        raise ValueError
except ValueError:
    assert gc.isenabled()
"""


def test_what_was_loaded_is_not_walked_again_and_what_was_lost_is_freed() -> None:
    subprocess.run([sys.executable, "-c", SETTLE], check=True, timeout=WAIT_S)


def test_nothing_is_walked_while_modules_are_loaded_and_what_they_leave_not_afterwards() -> None:
    subprocess.run([sys.executable, "-c", PAUSED], check=True, timeout=WAIT_S)
