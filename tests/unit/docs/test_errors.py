"""The messages that docs/errors.md explains are those of the source."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import flatfsdp
from tests.unit.docs.pages import DOCS

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
