"""The screen shows everything where it fits, and the question above all."""

from __future__ import annotations

import pytest
from rich.console import Console, RenderableType

from penstock.cli.watching.board import Board
from penstock.cli.watching.screen import FOCUS, HELP, page, screen
from penstock.cli.watching.view import duration, sparkline
from penstock.protocol.operations.reports import WorkerReport
from tests.cli.watching.snapshots import running, snapshot, worker


def lines(shown: RenderableType, width: int = 140) -> list[str]:
    console = Console(width=width, color_system=None, highlight=False, emoji=False)
    with console.capture() as capture:
        console.print(shown)
    return [line.rstrip() for line in capture.get().splitlines()]


def test_a_page_has_all_there_is() -> None:
    text = lines(page(snapshot()))
    assert "12 waiting, oldest 1 m 30 s  ·  4 running on 8 slots  ·  1 dead letter" in text
    row = next(line for line in text if line.startswith("w0"))
    assert row.split() == ["w0", "live", "tiny", "1.2", "cpu", "2", "2/4", "3/10", "1,234", "0.3", "s"]
    row = next(line for line in text if line.startswith("r1"))
    assert row.split() == ["r1", "w0", "acme", "running", "1", "m", "15", "s", "3.0", "s", "7", "1,500", "2"]
    assert any(line.split()[:3] == ["priority", "5,", "1"] for line in text)
    assert any(line.split() == ["acme", "12", "77"] for line in text)
    assert any(line.split()[:3] == ["1-0", "r-1-0", "too_many_crashes"] for line in text)


@pytest.mark.parametrize("width", [40, 140])
@pytest.mark.parametrize("height", [10, 17, 24, 60, 400])
def test_a_screen_is_as_high_as_the_terminal_and_ends_with_its_keys(width: int, height: int) -> None:
    board = Board(snapshot(num_workers=30, num_running=200, num_letters=10))
    for key in ("", "tab", "tab"):
        board.press(key)
        shown = lines(screen(board, width, height), width)
        assert len(shown) == height
        assert shown[-1].startswith(HELP[: width - 1])
        assert any(line.startswith(FOCUS) for line in shown)


def test_the_selected_row_is_on_it_however_far_down() -> None:
    board = Board(snapshot(num_workers=30, num_running=200))
    for key in ("tab", *["down"] * 150):
        board.press(key)
    shown = lines(screen(board, 140, 40))
    assert any(line.startswith("r150 ") for line in shown)
    assert any(line.startswith("▸ running requests: 200") for line in shown)


def test_a_question_stands_where_keys_did() -> None:
    board = Board(snapshot())
    board.press("d")
    assert lines(screen(board, 140, 40))[-1].startswith("[y/N] drain worker w0?")
    board.press("n")
    board.trouble = "no connection"
    assert lines(screen(board, 140, 40))[-1] == "no newer look: no connection"
    board.trouble = "no connection to redis://127.0.0.1:6379/0: Connection refused"
    narrow = lines(screen(board, 40, 40), 40)
    assert (len(narrow), " ".join(narrow[-3:])) == (40, f"no newer look: {board.trouble}")


@pytest.mark.parametrize(
    ("more", "state"),
    [
        ({}, "live"),
        ({"reported_s": 3.0}, "silent 3.0 s"),
        ({"heartbeat_left_ms": None}, "lost"),
        ({"is_draining": True}, "draining"),
        ({"report": WorkerReport(version="1", phase="serving", unready="no connection to Redis")},
         "unready"),
        ({"report": WorkerReport(version="1", phase="starting", unready="loading"), "heartbeat_left_ms": None},
         "starting"),
        ({"report": None, "reported_s": None}, "live"),
    ],
)  # fmt: skip
def test_states_of_a_worker(more: dict[str, object], state: str) -> None:
    text = lines(page(snapshot(workers=(worker("w0", **more),))))
    assert any(line.startswith(f"w0      {state}  ") for line in text), text


def test_what_others_wrote_moves_no_cursor() -> None:
    evil = running("\x1b[2Jr", tenant="[red]t", worker="\x07w")
    text = "\n".join(lines(page(snapshot(running=(evil,)))))
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "\\x1b[2Jr" in text
    assert "[red]t" in text


def test_figures() -> None:
    assert sparkline([0, 1, 2, 4]) == "▁▃▅█"
    assert sparkline([0, 0]) == "▁▁"
    assert sparkline([]) == ""
    assert [duration(s) for s in (0.04, 9.96, 59, 61, 3600, 90_000)] == [
        "0.0 s", "10.0 s", "59 s", "1 m 01 s", "1 h 00 m", "1 d 01 h",
    ]  # fmt: skip


def test_why_a_worker_is_not_ready_stands_beneath_the_table() -> None:
    why = "the model is being loaded: " + "x" * 300
    report = WorkerReport(version="1", phase="starting", unready=why)
    board = Board(snapshot(workers=(worker("w0", report=report, heartbeat_left_ms=None),)))
    shown = lines(page(board.snapshot), 400)
    assert f"w0: {why}" in shown
    assert lines(screen(board, 140, 40))[-1].startswith(f"{HELP}  ·  w0: the model is being loaded: xxx")


@pytest.mark.parametrize(
    ("width", "gone", "left"),
    [
        (140, set(), {"version", "device"}),
        (85, {"version"}, {"slots", "tokens/s"}),
        (50, {"version", "device", "pages"}, {"state"}),
    ],
)
def test_a_narrow_screen_leaves_columns_out_before_it_cuts_them(width: int, gone: set[str], left: set[str]) -> None:
    board = Board(snapshot(workers=(worker("a-long-hosts-name-a"), worker("a-long-hosts-name-b"))))
    shown = lines(screen(board, width, 60), width)
    titles = set(next(line for line in shown if line.startswith("worker ")).split())
    assert not titles & gone
    assert titles >= left | {"worker", "requests"}
    assert not any("…" in line and line.startswith("a-long") for line in shown)


@pytest.mark.parametrize("width", [50, 80, 120])
def test_no_number_is_cut_before_a_name_is(width: int) -> None:
    name, model = "a-worker-named-after-its-pod-7d9f8b6c5-x2x9k", "org/a-model-of-a-long-name-that-goes-on-Instruct"
    report = WorkerReport(version="1", phase="serving", model=model, slots=64, running_sequences=60, tokens_per_s=1234)
    board = Board(snapshot(workers=(worker(name, report=report),), running=(running("r" * 40, worker=name),)))
    shown = lines(screen(board, width, 40), width)
    for begin in ("a-worker", "rrr", "priority"):
        row = next(line for line in shown if line.startswith(begin))
        assert not any("…" in word for word in row.split() if word[0].isdigit()), row
    assert not any(
        "…" in title for line in shown if line.startswith(("worker ", "lane ", "request ")) for title in line
    )


def test_how_far_a_long_prompt_is_stands_before_its_length() -> None:
    text = "\n".join(lines(page(snapshot(running=(running("r", prompt_tokens=6800, prefilled=2048),)))))
    assert " 2,048/6,800 " in text
