"""Docstrings begin with a subject; ruff's `D` rules see to the rest."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.programs import ROOT

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
