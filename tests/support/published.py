"""The README and the results that are committed with it."""

from __future__ import annotations

import json
from typing import Any

from tests.support.programs import ROOT

RESULTS = ROOT / "benchmarks" / "results"
README = (ROOT / "README.md").read_text()


def results(file: str) -> Any:
    return json.loads((RESULTS / file).read_text())


def rows(file: str) -> dict[str, Any]:
    return {row["name"]: row for row in results(file)["rows"]}
