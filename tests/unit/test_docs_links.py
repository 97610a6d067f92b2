"""The pages' links to files and headings of this repository lead somewhere, and each page is found from the README."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token

PAGES = ["README.md", "SECURITY.md", "[a-z]*/README.md", "docs/*.md"]


@pytest.fixture
def pages(checkout: Path) -> list[Path]:
    return sorted(page for pattern in PAGES for page in checkout.glob(pattern))


def test_every_link_leads_somewhere(pages: list[Path]) -> None:
    broken = [f"{page}: {link}" for page in pages for link in links(page) if not leads_somewhere(page, link)]
    assert not broken


def test_every_page_is_found_from_the_readme(checkout: Path, pages: list[Path]) -> None:
    found, ahead = set[Path](), [checkout / "README.md"]
    while ahead:
        page = ahead.pop()
        if page not in found and page.suffix == ".md":
            found.add(page)
            ahead += [target(page, link)[0] for link in links(page)]
    assert set(pages) <= found


def links(page: Path) -> list[str]:
    """The links of a page that stay in the repository."""
    return [link for link in _links(tokens(page)) if not link.startswith("https://")]


def _links(of: list[Token]) -> Iterator[str]:
    for token in of:
        if token.type == "link_open":
            yield str(token.attrs["href"])
        yield from _links(token.children or [])


def leads_somewhere(page: Path, link: str) -> bool:
    path, anchor = target(page, link)
    return path.exists() and (not anchor or anchor in anchors(path))


def target(page: Path, link: str) -> tuple[Path, str]:
    path, _, anchor = link.partition("#")
    return ((page.parent / path).resolve() if path else page), anchor


def anchors(page: Path) -> set[str]:
    """What the headings of a page are called in links, as GitHub does it."""
    found = tokens(page)
    headings = (text.content for start, text in itertools.pairwise(found) if start.type == "heading_open")
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def tokens(page: Path) -> list[Token]:
    return MarkdownIt().enable("table").parse(page.read_text())
