"""Keys on the screen of `penstock top`: what they do, and what they only ask about."""

from __future__ import annotations

import pytest

from penstock.cli.watching.board import Action, Board, Quit
from penstock.cli.watching.keyboard import keys_of
from tests.cli.watching.snapshots import snapshot


def pressed(board: Board, *keys: str) -> list[Action]:
    return [action for key in keys if (action := board.press(key)) is not None]


@pytest.mark.parametrize(
    ("keys", "action"),
    [
        (("down", "d"), Action("drain", "w1")),
        (("tab", "down", "down", "c"), Action("cancel", "r2")),
        (("backtab", "r"), Action("replay", "1-0")),
    ],
)
def test_each_action_is_asked_about_and_done_after_yes_alone(keys: tuple[str, ...], action: Action) -> None:
    board = Board(snapshot())
    assert pressed(board, *keys) == []
    assert board.asked == action
    assert action.target in action.question
    for other in ("n", "escape", "tab", "d", "q"):
        found: tuple[list[Action], Action | None] = (pressed(board, other), board.asked)
        assert found == ([], None)
        assert "not done" in board.note
        pressed(board, keys[-1])
    assert pressed(board, "y") == [action]
    assert pressed(board, "y") == []  # once


def test_an_action_wants_its_table_and_a_row() -> None:
    board = Board(snapshot(num_letters=0))
    for key in "cr":
        assert pressed(board, key) == []
        assert board.asked is None
        assert "with Tab" in board.note
    assert pressed(board, "backtab", "r") == []
    assert (board.asked, board.note) == (None, "replay: there is no dead letter")


def test_what_is_selected_stays_so_wherever_it_moves() -> None:
    board = Board(snapshot(num_workers=3))
    pressed(board, "down", "down", "down")
    assert board.selected == 2
    without_first = snapshot(num_workers=3).workers[1:]
    board.show(snapshot(workers=without_first))
    assert board.selected == 1
    board.show(snapshot(num_workers=1))
    assert board.selected == 0
    board.show(snapshot(num_workers=0))
    found: tuple[int | None, list[Action]] = (board.selected, pressed(board, "down", "d"))
    assert found == (None, [])


def test_what_was_asked_about_is_done_though_rows_move_meanwhile() -> None:
    board = Board(snapshot(num_workers=3))
    pressed(board, "down", "d")
    board.show(snapshot(workers=snapshot(num_workers=3).workers[::-1]))
    assert pressed(board, "y") == [Action("drain", "w1")]


def test_q_ends_but_answers_a_question_with_no() -> None:
    board = Board(snapshot())
    pressed(board, "d", "q")
    assert "not done" in board.note
    with pytest.raises(Quit):
        board.press("q")


@pytest.mark.parametrize(
    ("data", "keys"),
    [
        (b"\x1b[A\x1bOBjq", ["up", "down", "j", "q"]),
        (b"\t\x1b[ZY", ["tab", "backtab", "y"]),
        (b"\x1b", ["escape"]),
        (b"\x1b[15~y", ["escape"]),  # no key we know: what follows is none of its own
        (b"\xff", ["\ufffd"]),
    ],
)
def test_keys_as_terminals_send_them(data: bytes, keys: list[str]) -> None:
    assert list(keys_of(data)) == keys
