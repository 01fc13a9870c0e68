"""The pages that a reader has: README.md and those in docs/."""

from __future__ import annotations

from tests.support.programs import ROOT

README = ROOT / "README.md"
DOCS = {page.name: page for page in sorted((ROOT / "docs").glob("*.md"))}
PAGES = {"README.md": README, **{f"docs/{name}": page for name, page in DOCS.items()}}
TEXT = "\n".join(page.read_text() for page in PAGES.values())
