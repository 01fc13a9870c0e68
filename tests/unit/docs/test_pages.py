"""The README stays short, what the pages link to is there, and every page is found by two clicks."""

from __future__ import annotations

import ast
import importlib.metadata
import re
from collections.abc import Iterator
from pathlib import Path
from pkgutil import resolve_name

import pytest

import flatfsdp
from tests.support.programs import ROOT
from tests.unit.docs.pages import DOCS, PAGES, README

NAME = re.compile(r"`(flatfsdp(?:\.[A-Za-z_]\w*)+)(?=[`(])(?<!\.json)")

MAX_WORDS = 900
MAX_COLUMNS = 88
CODE = re.compile(r"```.*?```", re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")


def relative_links(page: Path) -> Iterator[tuple[str, str]]:
    """The file, "" for the page itself, and the heading of each, "" for the whole file."""
    for target in LINK.findall(CODE.sub("", page.read_text())):
        if not re.match(r"[a-z]+:", target):
            file, _, heading = target.partition("#")
            yield file, heading


def headings(page: Path) -> set[str]:
    """Headings as links name them."""
    titles = re.findall(r"^#+ (.*)$", CODE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def linked_pages(page: Path) -> set[Path]:
    """Pages that one click leads to."""
    return {(page.parent / file).resolve() for file, _ in relative_links(page)} & set(DOCS.values())


def test_the_readme_is_short() -> None:
    assert len(README.read_text().split()) <= MAX_WORDS


@pytest.mark.parametrize("name", PAGES)
def test_code_is_narrow(name: str) -> None:
    """The site's column, and GitHub's, show this many characters without a scroll bar."""
    blocks = re.findall(r"```\w*\n(.*?)```", PAGES[name].read_text(), re.DOTALL)
    assert [line for block in blocks for line in block.splitlines() if len(line) > MAX_COLUMNS] == []


@pytest.mark.parametrize("start", [README, DOCS["index.md"]], ids=["readme", "site"])
def test_two_clicks_lead_to_each_page(start: Path) -> None:
    first = {start} | linked_pages(start)
    second = {page for each in first for page in linked_pages(each)}
    assert set(DOCS.values()) - first - second == set()


def test_the_menu_has_each_page_once() -> None:
    menu = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    assert sorted(re.findall(r"[\w/]+\.md", menu)) == sorted(DOCS)


@pytest.mark.parametrize("name", PAGES)
def test_links(name: str) -> None:
    page = PAGES[name]
    links = list(relative_links(page))
    assert [file for file, _ in links if not (page.parent / file).exists()] == []
    named = [(page.parent / file if file else page, heading) for file, heading in links if heading]
    assert [f"{file}#{heading}" for file, heading in named if heading not in headings(file)] == []


def test_names_of_the_package_exist() -> None:
    """Those in backticks, with the path from which they are imported."""
    named = {name for page in PAGES.values() for name in NAME.findall(page.read_text())}
    assert len(named) > 20
    for name in sorted(named):
        resolve_name(name)


def test_each_feature_names_a_page_and_a_test() -> None:
    rows = [line for line in DOCS["features.md"].read_text().splitlines() if line.startswith("| ")]
    features = [row for row in rows if not row.startswith("| feature |")]
    assert len(features) > 50
    for row in features:
        _, _, page, test, _ = row.split("|")
        assert LINK.search(page), row
        named = re.fullmatch(r" \[`(\w+)`\]\(\.\./(tests/[\w/]+\.py)\) ", test)
        assert named is not None and f"def {named[1]}(" in (ROOT / named[2]).read_text(), row


def test_pictures_are_those_of_the_script() -> None:
    script = ROOT / "docs" / "pictures" / "draw.py"
    found: dict[str, object] = {"__name__": "draw"}
    exec(compile(script.read_text(), str(script), "exec"), found)
    pictures = found["PICTURES"]
    assert isinstance(pictures, dict)
    drawn = {f"{name}.svg": draw().text() for name, draw in pictures.items()}
    assert drawn == {file.name: file.read_text() for file in script.parent.glob("*.svg")}


def test_versions_are_those_of_the_package() -> None:
    """All that setup.py asks for is in the table, but for tools of tests and docs."""
    tree = ast.parse((ROOT / "setup.py").read_text())
    texts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    wanted = {
        text.split(";")[0] for text in texts if isinstance(text, str) and re.match(r"[\w-]+[=>]=\d", text)
    }
    tools = ("pytest", "hypothesis", "ruff", "mypy", "mkdocs", "griffe", "setuptools")
    page = DOCS["versions.md"].read_text()
    missing = {each for each in wanted if not each.startswith(tools) and f"`{each}`" not in page}
    assert missing - {"lightning-fabric==2.6.6"} == set()


def test_the_package_its_metadata_and_the_citation_have_one_version() -> None:
    assert f"\nversion: {flatfsdp.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert importlib.metadata.version("flatfsdp") == flatfsdp.__version__
