"""The pages that a reader has: README.md those for contributors, and those in docs/, at any depth."""

from __future__ import annotations

from tests.support.programs import ROOT

README = ROOT / "README.md"
DOCS = {page.relative_to(ROOT / "docs").as_posix(): page for page in sorted((ROOT / "docs").rglob("*.md"))}
PROJECT = {f".github/{page.name}": page for page in sorted((ROOT / ".github").glob("*.md"))}
PAGES = {"README.md": README, **PROJECT, **{f"docs/{name}": page for name, page in DOCS.items()}}
TEXT = "\n".join(page.read_text() for page in PAGES.values())
