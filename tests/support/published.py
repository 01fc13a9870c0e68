"""The pages of the documentation, and the results that are committed with them."""

from __future__ import annotations

import json
from typing import Any

from tests.support.programs import ROOT

RESULTS = ROOT / "benchmarks" / "results"
PAGES = "\n".join(page.read_text() for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))])


def results(file: str) -> Any:
    return json.loads((RESULTS / file).read_text())


def rows(file: str) -> dict[str, Any]:
    return {row["name"]: row for row in results(file)["rows"]}
