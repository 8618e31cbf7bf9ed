"""Finds what reads as translated, as far as a pattern can: `python -m docs.scripts.english` prints it and exits with 1.

Docstrings may not begin with a fragment that needs the name above it to be read ("Of each request ..."). Neither they
nor the pages may write "is no" for "is not". Sentences of the pages may have 35 words; one of code and one of a link
count as a word each.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator

from docs.scripts.pages import ROOT, Page, all_pages, line_of, page

MOST_WORDS = 35
PACKAGES = tuple(sorted(path.name for path in (ROOT / "penstock").iterdir() if path.is_symlink()))
FOLDERS = ("penstock", *PACKAGES, "benchmarks", "deploy", "docs", "examples", "tests")
_FRAGMENT = re.compile(
    r"(Of|That of|Those of|What is|As|(By |For |From |In |To |With )?(which|whom)|Who|Whose|Such|Their|Its)\b",
    re.IGNORECASE,
)
_NOT_NO = re.compile(  # "is no text" for "is not text"
    r"(?<!here )\b(is|are|was|were) no (?!(longer|more|less|other|such|need|one|exception|wait)\b)[\w`]+", re.IGNORECASE
)
_END_OF_SENTENCE = re.compile(r"(?<=[.!?])[)\"]?\s+(?=[\"(`]?[A-Z])")


def main() -> int:
    found = [*_docstrings(), *_sentences()]
    for each in found:
        print(each)  # noqa: T201  it is its output
    return int(bool(found))


def _docstrings() -> Iterator[str]:
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = path.relative_to(ROOT)
            for line, text in _strings_alone(ast.parse(path.read_text())):
                if _FRAGMENT.match(text):
                    yield f"{name}:{line}: the docstring begins with a fragment: {text.splitlines()[0]}"
                for found in _NOT_NO.finditer(" ".join(text.split())):
                    yield f'{name}:{line}: "{found[0]}", where "not" is meant'


def _strings_alone(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yields docstrings, also those below constants and attributes."""
    for node in ast.walk(tree):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield node.lineno, text.strip()


def _sentences() -> Iterator[str]:
    for each in all_pages():
        for line, text in _paragraphs(page(each)):
            for found in _NOT_NO.finditer(text):
                yield f'{each}:{line}: "{found[0]}", where "not" is meant'
            for sentence in _END_OF_SENTENCE.split(text):
                *words, _ = sentence.split() or [""]
                if (count := len(words) + 1) > MOST_WORDS and not all(word.endswith(",") for word in words):
                    yield f"{each}:{line}: a sentence of {count} words: {sentence[:80]} ..."


def _paragraphs(read: Page) -> Iterator[tuple[int, str]]:
    for token in read.tokens:
        if token.type == "inline":
            words = ["Code" if part.type == "code_inline" else part.content for part in token.children or ()]
            yield line_of(token), "".join(part or " " for part in words)


if __name__ == "__main__":
    sys.exit(main())
