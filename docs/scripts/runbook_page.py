"""Writes deploy/prometheus/assets/runbook.html, to which alerts point: `python -m docs.scripts.runbook_page > FILE`.

It is docs/runbook.md as one file that Prometheus serves. Links to other pages become their names.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from markdown_it import MarkdownIt

RUNBOOK = Path(__file__).parents[1] / "runbook.md"
HEAD = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>Penstock: runbook</title>
<style>
:root { color-scheme: light dark }
body { font: 1rem/1.5 system-ui, sans-serif; max-width: 46rem; margin: 2rem auto; padding: 0 1rem }
h2 { margin-top: 2.5rem }
h2:target { outline: 2px solid; outline-offset: .3rem }
</style>
"""


def runbook_page() -> str:
    text = re.sub(r"\[([^]]+)\]\((?!#)([^)#]+)[^)]*\)", _named, RUNBOOK.read_text())
    body = MarkdownIt("commonmark").enable("table").render(text)
    return HEAD + re.sub(r"<h2>(\w+)</h2>", lambda found: f'<h2 id="{found[1].lower()}">{found[1]}</h2>', body)


def _named(link: re.Match[str]) -> str:
    """Returns a link to another page as text: what it says, and the page where that is another name."""
    return link[1] if link[1] == link[2] or "/" in link[1] else f"{link[1]} (docs/{link[2]})"


if __name__ == "__main__":
    sys.stdout.write(runbook_page())
