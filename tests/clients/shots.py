"""Pictures of pages: what is opened, on which screens, and what is done before the picture is taken."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.clients.environments import in_browser, run
from tests.support.packages import ROOT

PICTURES = ROOT / "build" / "pictures"


@dataclass(frozen=True, slots=True)
class View:
    """A screen, in CSS pixels."""

    width: int
    height: int
    scheme: str = "light"
    is_phone: bool = False


VIEWS: Mapping[str, View] = {
    "light": View(1280, 800),
    "dark": View(1280, 800, "dark"),
    "narrow": View(640, 800, "dark"),
    "phone": View(360, 740, is_phone=True),
}


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer in the place of the server's, to requests whose address has this part."""

    part: str
    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Shot:
    """A page at a moment.

    Attributes:
        steps: what `draw.mjs` does first, a name and its arguments each.
        session: what the tab has stored.
        is_asking: whether a dialog is to be open.
        is_judged: whether it is a page of ours, which `faults.mjs` then looks at.
    """

    name: str
    url: str
    steps: tuple[tuple[str, ...], ...] = ()
    session: Mapping[str, str] = field(default_factory=dict)
    answer: Answer | None = None
    is_asking: bool = False
    is_judged: bool = True
    view: View = VIEWS["light"]

    def on_every_screen(self) -> list[Shot]:
        return [dataclasses.replace(self, name=f"{self.name}-{name}", view=view) for name, view in VIEWS.items()]


async def drawn(shots: Iterable[Shot], scratch: Path) -> list[str]:
    """Draws pages into `PICTURES`, and returns what is wrong with them."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    listed = scratch / "shots.json"
    listed.write_text(json.dumps([dataclasses.asdict(shot) for shot in shots]))
    status, output = await run(*in_browser("draw.mjs"), listed, PICTURES)
    assert status == 0, output
    return output.splitlines()
