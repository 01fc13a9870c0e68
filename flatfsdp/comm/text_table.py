"""Tables of plain text, for what `print` shows of a model or a mesh."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def plain_table(lines: Sequence[Sequence[str]], right: Collection[int]) -> str:
    """Cells in columns, one row a line, two spaces between columns.

    Args:
        lines: all with the same number of cells; the first may be headings.
        right: columns that are aligned to the right.
    """
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if number in right else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ).rstrip()
        for cells in lines
    )
