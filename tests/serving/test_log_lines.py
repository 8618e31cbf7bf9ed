"""Lines of a log that can be written to, can't, or can't for a while."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.serving.log_lines import CAPACITY_BYTES, LogLines, Rank
from tests.support.patience import WAIT_S

LINE = "x" * 1023  # a KiB with its end


class Pipe:
    """A pipe that is read only when the test says so."""

    def __init__(self) -> None:
        self.reader, self.writer = os.pipe()
        self.is_open = True

    def write(self, data: memoryview) -> int:
        """Writes to the pipe. What comes after the test goes nowhere, so that its thread ends."""
        return os.write(self.writer, data) if self.is_open else len(data)

    def lines(self, end: str) -> list[str]:
        """Returns the lines up to `end`."""
        text = b""
        while not text.endswith(f"{end}\n".encode()):
            text += os.read(self.reader, 1 << 20)
        return text.decode().splitlines()

    def close_reader(self) -> None:
        os.close(self.reader)
        self.reader = -1


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    pipe = Pipe()
    yield pipe
    pipe.is_open = False
    for descriptor in (pipe.reader, pipe.writer):
        if descriptor != -1:
            os.close(descriptor)


def writing_to(pipe: Pipe) -> tuple[LogLines, list[int]]:
    told: list[int] = []
    return LogLines(pipe.write, told.append), told


def fill(lines: LogLines, rank: Rank) -> int:
    """Puts lines until one is dropped; returns their number."""
    count = 0
    while lines.put(f"{rank.name} {LINE}"[: len(LINE)], rank):
        count += 1
        assert count <= CAPACITY_BYTES // 1024 + 64  # what the pipe itself takes
    return count


def test_lines_come_in_order_and_are_written_by_the_end(pipe: Pipe) -> None:
    lines, told = writing_to(pipe)
    wanted = [f"line {number} ü" for number in range(100)]
    assert all(lines.put(line, Rank.PLAIN) for line in wanted)
    lines.close(WAIT_S)
    assert pipe.lines(wanted[-1]) == wanted
    assert (lines.num_dropped, told) == (0, [])


def test_of_a_pipe_that_nobody_reads_the_higher_ranks_have_a_reserve(pipe: Pipe) -> None:
    lines, told = writing_to(pipe)
    taken = [fill(lines, rank) for rank in Rank]
    for each, share in zip(taken, (6 / 8, 1 / 8, 1 / 8), strict=True):
        more = each * 1024 - CAPACITY_BYTES * share
        assert abs(more) < 0.01 * CAPACITY_BYTES, taken  # the pipe itself takes less, whichever rank it takes from
    assert not lines.put("info", Rank.PLAIN)
    assert lines.num_dropped == len(taken) + 1
    reading = threading.Thread(target=lambda: read.extend(pipe.lines("end")))
    read: list[str] = []
    reading.start()
    assert lines.rest(WAIT_S)
    assert sum(told) == len(taken) + 1  # as it took lines again
    assert lines.put("end", Rank.PLAIN)
    lines.close(WAIT_S)
    reading.join(WAIT_S)
    assert len(read) == sum(taken) + 1


def test_at_the_end_plain_lines_make_room_for_the_others(pipe: Pipe) -> None:
    lines, _ = writing_to(pipe)
    num_plain = fill(lines, Rank.PLAIN)
    lines.put("why it ended", Rank.VITAL)
    lines.close(0.1)
    assert lines.num_dropped > num_plain - 200  # but for what the pipe took
    read = pipe.lines("why it ended")
    assert len(read) < 200


@pytest.mark.parametrize("kind", ["full disk", "reader is gone", "closed"])
def test_what_can_never_be_written_raises_nothing_and_ends_in_time(kind: str, pipe: Pipe) -> None:
    if kind == "full disk":
        os.close(pipe.writer)
        pipe.writer = os.open("/dev/full", os.O_WRONLY)
    elif kind == "closed":
        pipe.writer, writer = 999_999, pipe.writer
        os.close(writer)
    else:
        pipe.close_reader()
    lines, _ = writing_to(pipe)
    assert lines.put("a line", Rank.PLAIN)
    lines.close(0.1)
    assert lines.put("one more", Rank.VITAL)
    lines.close(0.1)
    assert len(lines._waiting) == 2
    pipe.writer = -1 if kind == "closed" else pipe.writer


def test_what_could_not_be_written_is_tried_again(pipe: Pipe) -> None:
    tries: list[bytes] = []

    def write(data: memoryview) -> int:
        tries.append(bytes(data))
        if len(tries) < 3:
            raise OSError(28, "No space left on device")
        return os.write(pipe.writer, data[:5])

    lines = LogLines(write, lambda count: None)
    lines.put("a line of a log", Rank.PLAIN)
    assert lines.rest(WAIT_S)
    assert pipe.lines("a line of a log") == ["a line of a log"]  # five bytes at a time


@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")  # where JAX is loaded, which the child does not use
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_process_that_is_forked_has_lines_of_its_own(pipe: Pipe) -> None:
    lines, _ = writing_to(pipe)
    fill(lines, Rank.PLAIN)  # and its thread is in the middle of a write
    pid = os.fork()
    if pid == 0:
        own = lines.put("of the child", Rank.PLAIN) and lines._num_bytes == len("of the child\n")
        os._exit(0 if own else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_signals_are_not_for_the_thread_that_writes(pipe: Pipe) -> None:
    lines, _ = writing_to(pipe)
    lines.put("a line", Rank.PLAIN)
    thread = lines._thread
    assert thread is not None
    with Path(f"/proc/self/task/{thread.native_id}/status").open() as status:
        (mask,) = [line.split()[1] for line in status if line.startswith("SigBlk")]
    lines.close(WAIT_S)
    assert int(mask, 16) & 1 << 14  # SIGTERM
