"""Commands that the pages name exist, and so do their options."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.programs import ROOT
from tests.unit.docs.pages import PAGES

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
