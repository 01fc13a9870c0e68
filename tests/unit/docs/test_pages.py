"""The README stays short, and what the pages link to is there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.docs.pages import DOCS, PAGES, README

MAX_WORDS = 1200
CODE = re.compile(r"```.*?```", re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")


def relative_links(page: Path) -> Iterator[tuple[str, str]]:
    """The file, "" for the page itself, and the heading of each, "" for the whole file."""
    for target in LINK.findall(CODE.sub("", page.read_text())):
        if not re.match(r"[a-z]+:", target):
            file, _, heading = target.partition("#")
            yield file, heading


def headings(page: Path) -> set[str]:
    """As links name them."""
    titles = re.findall(r"^#+ (.*)$", CODE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_the_readme_is_short() -> None:
    assert len(README.read_text().split()) <= MAX_WORDS


def test_the_readme_leads_to_all_pages() -> None:
    linked = {file for file, _ in relative_links(README)}
    assert linked >= {f"docs/{name}" for name in DOCS}


@pytest.mark.parametrize("name", PAGES)
def test_links(name: str) -> None:
    page = PAGES[name]
    links = list(relative_links(page))
    assert [file for file, _ in links if not (page.parent / file).exists()] == []
    named = [(page.parent / file if file else page, heading) for file, heading in links if heading]
    assert [f"{file}#{heading}" for file, heading in named if heading not in headings(file)] == []
