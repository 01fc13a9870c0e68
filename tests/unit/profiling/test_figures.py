"""JSON of commands stays JSON, whatever the numbers are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flatfsdp.profiling.step_time import to_json


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


@pytest.mark.parametrize("indent", [None, 2])
def test_numbers_that_json_has_not_are_null(indent: int | None) -> None:
    figures = {
        "loss": float("nan"),
        "norms": [1.5, float("inf"), (-float("inf"), 2)],
        "out": Path("a/b"),
        "ok": True,
    }
    parsed = json.loads(to_json(figures, indent=indent), parse_constant=refuse)
    assert parsed == {"loss": None, "norms": [1.5, None, [None, 2]], "out": str(Path("a/b")), "ok": True}
