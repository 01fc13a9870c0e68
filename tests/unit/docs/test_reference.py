"""The reference has every public name of a package, and takes no file for the function in it."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

import flatfsdp
from tests.unit.docs.pages import DOCS

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
    files = [
        each
        for each in shown(REFERENCE[name])
        if (PACKAGE / each.replace(".", "/")).with_suffix(".py").exists()
    ]
    assert name == "api/contract.md" or files == []
