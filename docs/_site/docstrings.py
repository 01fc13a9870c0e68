"""Docstrings as the reference needs them: what Google's style has no place for is moved, not lost.

A remark about all errors at the end of "Raises:" becomes a paragraph behind the section, and a continuation
that is aligned with a bracket is indented as the style has it.
"""

from __future__ import annotations

import re

import griffe

ENTRY = re.compile(r"    [\w.]+(, [\w.]+)*: ")


class Mended(griffe.Extension):
    """Changes each docstring before it is parsed."""

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        if obj.docstring is not None:
            obj.docstring.value = mended(obj.docstring.value)


def mended(text: str) -> str:
    lines: list[str] = []
    remark: list[str] = []
    section = ""
    for line in [*text.splitlines(), ""]:
        if not line.startswith(" "):
            if remark:
                lines += ["", *remark]
                remark = []
            section = line
        if section == "Raises:" and (
            remark or (re.match(r" {4}\S", line) and not ENTRY.match(line))
        ):
            remark.append(line.strip())
        elif section in ("Returns:", "Raises:"):
            lines.append(re.sub(r"^ {5,7}(?=\S)", " " * 8, line))
        else:
            lines.append(line)
    return "\n".join(lines).rstrip()
