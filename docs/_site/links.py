"""Links that lead out of docs/: the site gets a copy of each file that a page links to.

On GitHub such a link opens the file in the repository.  A built site has no repository beside it, so Python
files and texts become pages, pictures and results are copied, and a folder stands for the file that
describes it.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

OUTWARD = re.compile(r"\]\(((?:\.\./)+[^)\s#]+)(#[^)\s]*)?\)")
COPIES = "repository"
SHOWN_AS_TEXT = {".py": "python", ".md": "markdown", ".toml": "toml", ".yml": "yaml"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds what pages link to outside of docs/."""
    docs = Path(config.docs_dir)
    for page in list(files.documentation_pages()):
        for match in OUTWARD.finditer(page.content_string):
            source = target_of(page.src_uri, match[1], docs)
            if source is not None and files.get_file_from_path(address(source, docs)) is None:
                files.append(copied(source, docs, config))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turns links out of docs/ into links to the copies."""
    docs = Path(config.docs_dir)
    if page.file.src_uri.startswith(f"{COPIES}/"):
        return markdown

    def inward(match: re.Match[str]) -> str:
        source = target_of(page.file.src_uri, match[1], docs)
        if source is None:
            return match[0]
        return f"]({posixpath.relpath(address(source, docs), posixpath.dirname(page.file.src_uri) or '.')})"

    return OUTWARD.sub(inward, markdown)


def target_of(page: str, link: str, docs: Path) -> Path | None:
    """The file that a link leads to, None if it stays inside docs/.  README.md is the site's first page."""
    path = (docs / page).parent.joinpath(link).resolve()
    if path.is_relative_to(docs):
        return None
    if path.is_dir():
        path = next(file for file in (path / "README.md", path / "__init__.py") if file.exists())
    return path


def address(source: Path, docs: Path) -> str:
    """The place of a copy in the site."""
    inside = f"{COPIES}/{source.relative_to(docs.parent).as_posix()}"
    return f"{inside}.md" if source.suffix in SHOWN_AS_TEXT else inside


def copied(source: Path, docs: Path, config: MkDocsConfig) -> File:
    where = address(source, docs)
    if source.suffix not in SHOWN_AS_TEXT:
        return File.generated(config, where, abs_src_path=str(source), inclusion=InclusionLevel.NOT_IN_NAV)
    name = source.relative_to(docs.parent).as_posix()
    fence = "`````"
    text = f"# {name}\n\n{fence}{SHOWN_AS_TEXT[source.suffix]}\n{source.read_text()}\n{fence}\n"
    return File.generated(config, where, content=text, inclusion=InclusionLevel.NOT_IN_NAV)
