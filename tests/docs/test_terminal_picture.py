"""docs/top.svg, drawn from an earlier run, shows the view as it is now."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections import defaultdict

from docs.scripts import terminal_view
from docs.scripts.pages import ROOT
from penstock.cli.watching.board import Board
from penstock.cli.watching.view import running_table, workers_table
from penstock.protocol.operations.snapshot import RunningRequest, Snapshot, Worker

SVG = "{http://www.w3.org/2000/svg}"
PICTURE = ROOT / "docs" / "top.svg"
CHARACTER_WIDTH = 12.2  # as rich draws: 0.61 of 20


def rows(svg: str) -> list[str]:
    found: dict[float, str] = defaultdict(str)
    pieces = [text for text in ET.fromstring(svg).iter(f"{SVG}text") if "textLength" in text.attrib]
    for text in sorted(pieces, key=lambda piece: float(piece.attrib["x"])):
        y, column = float(text.attrib["y"]), round(float(text.attrib["x"]) / CHARACTER_WIDTH)
        found[y] = found[y].ljust(column) + (text.text or "").replace("\u00a0", " ")
    return [found[y] for y in sorted(found)]


def test_it_loads_nothing() -> None:
    references = re.findall(r"url\(([^)]*)\)|(?:href|src)=\"([^\"]*)\"|@import", PICTURE.read_text())
    assert all(reference.startswith("#top-") for pair in references for reference in pair if reference)


def test_it_shows_a_takeover_in_the_view_as_it_is() -> None:
    shown = "\n".join(rows(PICTURE.read_text()))
    for table in (workers_table([]), running_table([])):
        titles = r"\s+".join(re.escape(str(column.header)) for column in table.columns)
        assert re.search(titles, shown), titles
    assert re.search(r"^one +lost", shown, re.MULTILINE)
    assert re.search(r"tokens/s [▁▂▃▄▅▆▇█]{5,}", shown)
    assert "lanes: " in shown
    assert "dead letters: " in shown
    assert re.search(r" (two|three) .* running .* 1 *$", shown, re.MULTILINE), "a request with a takeover"


def test_what_is_drawn_is_what_the_board_shows() -> None:
    worker = Worker("one", 1, None, is_draining=False)
    running = RunningRequest("an-id", "two", "acme", "running", 4.0, 1.0, 9, 33, 1)
    snapshot = Snapshot(
        "stories",
        0,
        (worker,),
        (running,),
        7,
        0,
        2.0,
        (),
        load=None,
        card=None,
        num_dead=0,
        num_malformed=0,
        letters=(),
    )
    drawn = rows(terminal_view.drawn(Board(snapshot)))
    assert any(re.search(r"7 waiting, oldest 2\.0 s", row) for row in drawn)
    assert any(re.search(r"^one +lost", row) for row in drawn)
    assert any(re.search(r"^an-id +two +acme +running +4\.0 s +1\.0 s +9 +33 +1", row) for row in drawn)
    assert terminal_view.shows_a_takeover(snapshot)
