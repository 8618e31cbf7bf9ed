"""MkDocs hooks for the pages of the site that do not lie in docs/.

README.md is its first page, CHANGELOG.md its last, and the reference is made of docstrings. Each file of the repository
that a page links to becomes a page too, so every link can be followed and is checked, without a website. At the end all
pages are searched for resources that they would load from elsewhere.
"""

from __future__ import annotations

import posixpath
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from markdown import Markdown
from markdown.extensions import Extension
from markdown.treeprocessors import Treeprocessor
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from docs.scripts import pages
from docs.scripts.pages import ROOT
from docs.scripts.reference import SECTIONS, page_of

_SOURCES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "reporting.md",
    "CHANGELOG.md": "changes.md",
}
_REPOSITORY = "repository"
_LOADING = {
    "audio": "src", "embed": "src", "iframe": "src", "img": "src", "link": "href", "script": "src", "source": "src",
    "video": "src",
}  # fmt: skip
_LINKS_OUTWARDS = frozenset({"canonical", "next", "prev"})


class _Sources:
    """Maps pages of the site to files of the repository."""

    def __init__(self) -> None:
        self.shown: dict[str, str] = {}  # the site's path to the repository's

    def place_of(self, path: str) -> str:
        """Returns the site's path of a file or folder of the repository."""
        if path in _SOURCES:
            return _SOURCES[path]
        if path.startswith("docs/"):
            return path.removeprefix("docs/")
        if (ROOT / path).is_dir():
            return f"{_REPOSITORY}/{path}/index.md"
        return f"{_REPOSITORY}/{path}" + ("" if path.endswith(".md") else ".md")

    def path_of(self, place: str) -> str:
        return self.shown.get(place, f"docs/{place}")

    def target_of(self, place: str, target: str) -> str:
        """Returns the target of a link on the page at `place`, as the site has it."""
        parts = urlsplit(target)
        if parts.scheme or parts.netloc or not parts.path:
            return target
        path = posixpath.normpath(posixpath.join(posixpath.dirname(self.path_of(place)), parts.path))
        linked = posixpath.relpath(self.place_of(path), posixpath.dirname(place) or ".")
        return urlunsplit(parts._replace(path=linked))


_sources = _Sources()


class _Links(Treeprocessor):
    """Turns links between files of the repository into links between pages, before MkDocs looks at them."""

    place = ""

    def run(self, root: ET.Element) -> None:
        if self.place.startswith("reference/"):
            return  # written as the site has them
        for element in root.iter():
            for key in ("href", "src"):
                if target := element.get(key):
                    element.set(key, _sources.target_of(self.place, target))


class _LinksExtension(Extension):
    def __init__(self) -> None:
        super().__init__()
        self.links: _Links | None = None

    def extendMarkdown(self, md: Markdown) -> None:  # noqa: N802  the name that Markdown calls
        self.links = _Links(md)
        md.treeprocessors.register(self.links, "penstock-links", 10)  # behind inline text, before MkDocs


_extension = _LinksExtension()


def on_config(config: MkDocsConfig) -> None:
    config.markdown_extensions.append(_extension)


def on_files(files: Files, config: MkDocsConfig) -> None:
    for path, place in _SOURCES.items():
        _add(files, config, path, place)
    for name, section in SECTIONS.items():
        files.append(File.generated(config, f"reference/{name}.md", content=page_of(section)))
    waiting = [
        str(path.relative_to(ROOT)) for path in (*ROOT.glob("docs/**/*.md"), *(ROOT / name for name in _SOURCES))
    ]
    while waiting:
        for path in _linked_from(waiting.pop()):
            place = _sources.place_of(path)
            if files.get_file_from_path(place) is None:
                _add(files, config, path, place)
                waiting += [path] if path.endswith(".md") else []


def _linked_from(source: str) -> Iterator[str]:
    """Yields the files of the repository that a page links to."""
    for link in pages.page(source).links:
        parts = urlsplit(link.target)
        if not parts.scheme and parts.path:
            yield posixpath.normpath(posixpath.join(posixpath.dirname(source), parts.path))


def _add(files: Files, config: MkDocsConfig, path: str, place: str) -> None:
    _sources.shown[place] = path
    files.append(File.generated(config, place, content=_content(ROOT / path)))


def _content(path: Path) -> str:
    """Returns a page unchanged, a file as code, and a folder as a list of its files."""
    if path.suffix == ".md":
        return path.read_text()
    name = path.relative_to(ROOT)
    if path.is_dir():
        entries = sorted(f"- `{entry.name}`" for entry in path.iterdir() if not entry.name.startswith((".", "_")))
        return f"# {name}\n\n" + "\n".join(entries) + "\n"
    text = path.read_text()
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"# {name}\n\n{fence}\n{text}{fence}\n"


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    _Links.place = page.file.src_uri
    return markdown


def on_post_build(config: MkDocsConfig) -> None:
    """Checks the finished site.

    Raises:
        PluginError: a page would load something from elsewhere.
    """
    found = [line for path in sorted(Path(config.site_dir).rglob("*")) for line in _loaded_from_elsewhere(path)]
    if found:
        raise PluginError("pages load from elsewhere:\n" + "\n".join(found))


def _loaded_from_elsewhere(path: Path) -> Iterator[str]:
    if path.suffix == ".html":
        reader = _Loads()
        reader.feed(path.read_text())
        targets = reader.found
    elif path.suffix in (".css", ".svg"):
        targets = re.findall(r"(?:url\(|@import )[\"']?([^\"')\s]+)", path.read_text())
    else:
        return
    for target in targets:
        if urlsplit(target).netloc:
            yield f"{path}: {target}"


class _Loads(HTMLParser):
    """Collects what a browser fetches for a page without being asked."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag == "link" and set((given.get("rel") or "").split()) & _LINKS_OUTWARDS:
            return
        if target := given.get(_LOADING.get(tag, "")):
            self.found.append(target)
