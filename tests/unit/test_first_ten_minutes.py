"""The script that follows the first steps of a new user finds the program that the pages give them."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from tests.support.programs import ROOT

own_model = runpy.run_path(str(ROOT / ".ci" / "first_ten_minutes.py"))["own_model"]


def test_the_page_for_beginners_has_one_program() -> None:
    program = own_model(ROOT)
    assert "shard(" in program and "print(" in program
    compile(program, "train.py", "exec")


def test_a_page_without_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "getting_started.md").write_text("```python\n# other.py\n```\n")
    with pytest.raises(SystemExit, match="has 0 programs"):
        own_model(tmp_path)
