"""What pages say of the source is there: commands, messages, names; docstrings begin with a subject."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import flatfsdp
from tests.support.programs import ROOT
from tests.unit.docs.pages import DOCS, PAGES

# -- commands and their options --------------------------------------------------------------------------

COMMAND = re.compile(
    r"(?:(?P<file>(?:benchmarks|examples)/\w+\.py)|(?<!\w)-m (?P<module>flatfsdp|tests\.support\.faults)\b)"
    r"(?P<rest>[^`|;]*)"
)
SOURCES = {
    "flatfsdp": ("flatfsdp/cli", "flatfsdp/training"),
    "tests.support.faults": ("tests/support/faults",),
    "benchmarks": ("benchmarks",),
    "examples": ("examples", "flatfsdp/cli", "flatfsdp/training"),
}


def commands(page: Path) -> Iterator[tuple[str, str]]:
    """What is run, and the options that follow it: in blocks a line each, in text between backticks."""
    text = page.read_text()
    blocks = re.findall(r"```\n(.*?)```", text, re.DOTALL)
    joined = (re.sub(r"\s*\\\n\s*", " ", block) for block in blocks)
    shell = [line for block in joined for line in block.splitlines()]
    inline = [
        " ".join(code.split())
        for code in re.findall(r"(?<!`)`([^`]+)`(?!`)", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    ]
    for line in [*shell, *inline]:
        for match in COMMAND.finditer(line):
            yield match["file"] or match["module"], match["rest"]


def source_of(program: str) -> str:
    folders = SOURCES[program.split("/")[0]]
    return "\n".join(file.read_text() for folder in folders for file in sorted((ROOT / folder).rglob("*.py")))


@pytest.mark.parametrize("name", PAGES)
def test_options_exist(name: str) -> None:
    for program, rest in commands(PAGES[name]):
        assert not program.endswith(".py") or (ROOT / program).exists(), program
        source = source_of(program)
        for option in re.findall(r"--([a-z][a-z0-9-]+)", rest):
            word = option.removeprefix("no-").replace("-", "_")
            assert re.search(rf"\b{word}\b", source), f"{name}: {program} has no --{option}"


def test_pages_name_commands() -> None:
    assert sum(len(list(commands(page))) for page in PAGES.values()) > 30


# -- messages of docs/errors.md --------------------------------------------------------------------------

GAP = "\0"
"""What a message fills in."""


def texts_of(node: ast.AST) -> str | None:
    """A literal, with gaps where values go; None for what is no text."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        parts = (texts_of(part) if isinstance(part, ast.Constant) else GAP for part in node.values)
        return "".join(part or "" for part in parts)
    return None


def all_texts() -> Iterator[str]:
    for path in sorted(Path(flatfsdp.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if (text := texts_of(node)) is not None:
                yield text


@cache
def source() -> str:
    """Not found while tests are collected, which every test process does."""
    return "\n".join(all_texts())


MESSAGES = re.findall(r"^\| `([^`]+)` \|", DOCS["errors.md"].read_text(), re.MULTILINE)


@pytest.mark.parametrize("message", MESSAGES)
def test_the_source_has_the_message(message: str) -> None:
    parts = [re.escape(part) for part in re.split(r"\.\.\.", message)]
    assert re.search("[^\n]{0,200}".join(parts), source()), message


def test_the_page_has_messages() -> None:
    assert len(MESSAGES) > 40


# -- the reference ---------------------------------------------------------------------------------------

PACKAGE = Path(flatfsdp.__file__).parent.parent
REFERENCE = {name: page for name, page in DOCS.items() if name.startswith("api/") and name != "api/index.md"}
OTHERS_NAMES = {"Fabric", "Float8BlockScaling", "Float8CurrentScaling", "FSDP"}
"""Lightning's own class, and second names of classes."""


def shown(page: Path) -> list[str]:
    return re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)


@pytest.mark.parametrize("name", REFERENCE)
def test_all_public_names_are_shown(name: str) -> None:
    title = REFERENCE[name].read_text().splitlines()[0].removeprefix("# ")
    for library in ("lightning", "trl"):
        if library in name:
            pytest.importorskip(library)
    public = getattr(importlib.import_module(title), "__all__", [])
    assert set(public) - {each.rpartition(".")[2] for each in shown(REFERENCE[name])} <= OTHERS_NAMES


@pytest.mark.parametrize("name", REFERENCE)
def test_names_are_not_those_of_files(name: str) -> None:
    """A function and the file that it is in may have one name, and the file would be shown."""
    paths = {each: PACKAGE / f"{each.replace('.', '/')}.py" for each in shown(REFERENCE[name])}
    files = [each for each, path in paths.items() if path.exists()]
    assert name == "api/contract.md" or files == []


# -- docstrings: ruff's `D` rules see to the rest --------------------------------------------------------

FOLDERS = ("flatfsdp", "kernels", "tests", "benchmarks", "examples", "docs")
WITHOUT_SUBJECT = re.compile(r"(Of|That|As|Where)\b")
NAMED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def docstrings(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, NAMED) and (found := ast.get_docstring(node)):
            yield found


@pytest.mark.parametrize("folder", FOLDERS)
def test_first_lines_stand_alone(folder: str) -> None:
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    found = [
        f"{file.relative_to(ROOT)}: {docstring.splitlines()[0]}"
        for file in files
        for docstring in docstrings(file)
        if WITHOUT_SUBJECT.match(docstring)
    ]
    assert not found, "\n".join(found)
