"""Plain-text tables, for printing a model or a mesh."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def plain_table(lines: Sequence[Sequence[str]], right: Collection[int]) -> str:
    """Formats cells in columns, one row a line, two spaces between columns.

    Args:
        lines: rows with equal numbers of cells; the first may be headings.
        right: indices of columns that are aligned to the right.
    """
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if number in right else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ).rstrip()
        for cells in lines
    )
