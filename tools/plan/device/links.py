"""How long the collectives of a compiled step take, and how long it waits for them, from the order of its HLO.

Links carry one collective after another. A collective that is not a pair of start and done is waited for in full. For a
pair, the expected cycles of what runs between start and done reduce the wait; kernels have no estimate, so they hide
nothing. Bytes travel around a ring, both ways at once, as in `roofline.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.tools.plan.device.chips import Chip
from penstock.tools.plan.device.hlo import HloModule
from penstock.tools.plan.device.hlo_text import Computation, Instruction
from penstock.tools.plan.device.roofline import all_reduce_s


@dataclass(frozen=True, slots=True)
class LinkTime:
    seconds: float  # of all collectives
    waited_s: float  # part of it in which nothing else was computed
    num_pairs: int = 0  # of starts and ends; all other collectives are waited for in full

    @property
    def hidden_share(self) -> float:
        return 1 - self.waited_s / self.seconds if self.seconds else 0.0


def link_time(program: HloModule, computation: Computation, chip: Chip, num_devices: int) -> LinkTime:
    """Returns the link time of `computation` with its loops, for collectives over `num_devices`; skips branches."""
    schedule = _Schedule(program, chip, num_devices)
    schedule.run(computation)
    return LinkTime(schedule.links_s, schedule.waited_s, schedule.num_pairs)


class _Schedule:
    """One run of a computation, on a virtual clock."""

    def __init__(self, program: HloModule, chip: Chip, num_devices: int) -> None:
        self.links_s = self.waited_s = 0.0
        self.num_pairs = 0
        self._program, self._chip, self._num_devices = program, chip, num_devices
        self._now_s = self._links_free_s = 0.0
        self._ends_s: dict[str, float] = {}  # of collectives in flight, by the names of their starts

    def run(self, computation: Computation) -> None:
        for instruction in computation.instructions.values():
            collective = self._program.collective(instruction)
            if instruction.opcode == "while":
                self._loop(instruction)
            elif collective is not None:
                self._send(instruction.name, collective)
                if instruction.opcode.endswith("-start"):
                    self.num_pairs += 1
                else:
                    self._wait_for(instruction.name)
            elif instruction.opcode.endswith("-done") and instruction.operands[0] in self._ends_s:
                self._wait_for(instruction.operands[0])
            else:
                self._now_s += instruction.cycles / self._chip.clock_hz

    def _loop(self, loop: Instruction) -> None:
        body = _Schedule(self._program, self._chip, self._num_devices)
        body.run(self._program.body(loop))
        trips = self._program.trips(loop)
        self._now_s += trips * body._now_s
        self.links_s += trips * body.links_s
        self.waited_s += trips * body.waited_s
        self.num_pairs += trips * body.num_pairs

    def _send(self, name: str, collective: Instruction) -> None:
        seconds = self._seconds(collective)
        self._links_free_s = self._ends_s[name] = max(self._now_s, self._links_free_s) + seconds
        self.links_s += seconds

    def _wait_for(self, name: str) -> None:
        wait_s = max(0.0, self._ends_s.pop(name) - self._now_s)
        self._now_s += wait_s
        self.waited_s += wait_s

    def _seconds(self, collective: Instruction) -> float:
        """Returns an all-reduce's time, or half of it for all else: it is a reduce-scatter and an all-gather."""
        kind, num_bytes = collective.opcode.removesuffix("-start"), collective.results[-1].num_bytes
        if kind == "reduce-scatter":  # its result is a device's share
            num_bytes *= self._num_devices
        whole_s = all_reduce_s(num_bytes, self._num_devices, self._chip)
        return whole_s if kind == "all-reduce" else whole_s / 2
