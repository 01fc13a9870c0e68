"""The version on each page, and links that lead out of docs/: the site gets a copy of each linked file.

On GitHub such a link opens the file in the repository.  A built site has no repository beside it.  So texts
and Python files become pages, pictures and results are copied, and a folder is the file that describes it.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

LINK = re.compile(r"\]\((?![a-z]+:|#)([^)\s#]+)(#[^)\s]*)?\)")
COPIES = "repository"


def on_config(config: MkDocsConfig) -> None:
    """Puts the version at the foot of each page."""
    package = Path(config.docs_dir).parent / "flatfsdp" / "__init__.py"
    version = re.search(r'^__version__ = "(.+)"$', package.read_text(), re.MULTILINE)
    assert version is not None
    config.copyright = f"FlatFSDP {version[1]}, Apache-2.0"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds what pages link to outside of docs/, and what copied texts link to in turn."""
    docs = Path(config.docs_dir)
    texts = [
        (docs / page.src_uri, page.content_string)
        for page in files.documentation_pages()
    ]
    while texts:
        place, text = texts.pop()
        for match in LINK.finditer(text):
            source = target_of(place, match[1])
            if (
                source is None
                or source.is_relative_to(docs)
                or files.get_file_from_path(address(source, docs))
            ):
                continue
            files.append(copied(source, docs, config))
            if source.suffix == ".md":
                texts.append((source, source.read_text()))
    return files


def on_page_markdown(
    markdown: str, page: Page, config: MkDocsConfig, files: Files
) -> str:
    """Turns links out of docs/ into links to the copies."""
    docs = Path(config.docs_dir)
    if page.file.src_uri.startswith(f"{COPIES}/"):
        return markdown
    return relinked(markdown, docs / page.file.src_uri, page.file.src_uri, docs)


def relinked(text: str, place: Path, page: str, docs: Path) -> str:
    """The text of the file at `place` for the site's `page`."""

    def link(match: re.Match[str]) -> str:
        source = target_of(place, match[1])
        if source is None:
            return match[0]
        heading = (match[2] or "") if source.suffix == ".md" else ""
        return f"]({posixpath.relpath(address(source, docs), posixpath.dirname(page) or '.')}{heading})"

    return LINK.sub(link, text)


def target_of(place: Path, link: str) -> Path | None:
    """The file that a link in the file at `place` leads to; None if there is none."""
    path = place.parent.joinpath(link).resolve()
    if path.is_dir():
        described = (path / name for name in ("README.md", "__init__.py"))
        return next((file for file in described if file.exists()), None)
    return path if path.exists() else None


def address(source: Path, docs: Path) -> str:
    """The place of a file in the site."""
    if source.is_relative_to(docs):
        return source.relative_to(docs).as_posix()
    inside = f"{COPIES}/{source.relative_to(docs.parent).as_posix()}"
    return f"{inside}.md" if source.suffix == ".py" else inside


def copied(source: Path, docs: Path, config: MkDocsConfig) -> File:
    where = address(source, docs)
    if source.suffix == ".md":
        content = relinked(source.read_text(), source, where, docs)
    elif source.suffix == ".py":
        content = f"# {source.relative_to(docs.parent)}\n\n````python\n{source.read_text()}\n````\n"
    else:
        return File.generated(
            config, where, abs_src_path=str(source), inclusion=InclusionLevel.NOT_IN_NAV
        )
    return File.generated(
        config, where, content=content, inclusion=InclusionLevel.NOT_IN_NAV
    )
