"""Searches the fastest tiles for `kernels/shared/tiles.py` on this GPU.

Determines which entries of the table each of the benchmark's calls looks up, and tries the entry's
neighbours: every field halved and doubled, one at a time, and again around the best one until none is
faster.  Tiles that do not compile, or do not fit, are skipped.  With --write the table is rewritten; commit
it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import torch
import typer
from lib.kernel_cases import Bench, Case
from lib.kernel_sizes import FULL
from lib.kernel_times import Timed
from rich.console import Console
from rich.table import Table

from flatfsdp.kernels.shared import tiles as _tiles
from flatfsdp.kernels.shared.tiles import TILES, Tile

Key = tuple[str, int, int]

WORTH = 0.98
"""A tile has to take less than this share of the present one's time to replace it."""

BATCHES = 5


class Watched(dict[Key, Tile]):
    """The table, which remembers its look-ups."""

    def __init__(self, table: dict[Key, Tile]) -> None:
        super().__init__(table)
        self.seen: dict[Key, None] = {}

    def __getitem__(self, key: Key) -> Tile:
        self.seen[key] = None
        return super().__getitem__(key)


def keys_of(case: Case) -> list[Key]:
    """Entries that one call of the case looks up."""
    watched = Watched(TILES)
    _tiles.TILES = watched
    _tiles.find.cache_clear()
    try:
        case.make()()
    finally:
        _tiles.TILES = TILES
        _tiles.find.cache_clear()
    return list(watched.seen)


def neighbours(tile: Tile) -> Iterator[Tile]:
    """Tiles with one field halved or doubled."""
    for field in ("rows", "cols", "warps", "stages", "steps"):
        value = getattr(tile, field)
        for other in (value // 2, value * 2):
            if other >= 1 and (field != "warps" or other <= 32) and (field != "stages" or other <= 4):
                yield tile._replace(**{field: other})


def microseconds(case: Case, key: Key, tile: Tile, device: torch.device) -> float | None:
    """Time of the fastest batch with this tile; None if it does not run."""
    before = TILES[key]
    TILES[key] = tile
    _tiles.find.cache_clear()
    try:
        timed = Timed(case.kernel, case.calls(), device)
        timed.warm_up()
        for _ in range(BATCHES):
            timed.measure()
        return min(timed.us)
    except Exception:  # Triton's own kinds of errors: too much shared memory, shapes it cannot take
        return None
    finally:
        TILES[key] = before
        _tiles.find.cache_clear()


def search(case: Case, key: Key, device: torch.device) -> tuple[Tile, float, float]:
    """The best tile found, its time, and the present one's."""
    present = microseconds(case, key, TILES[key], device)
    assert present is not None
    best, fastest, tried = TILES[key], present, {TILES[key]}
    while True:
        found = {}
        for tile in neighbours(best):
            if tile not in tried:
                tried.add(tile)
                us = microseconds(case, key, tile, device)
                if us is not None:
                    found[tile] = us
        candidate = min(found, key=found.__getitem__, default=best)
        if candidate is best or found[candidate] >= WORTH * fastest:
            return best, fastest, present
        best, fastest = candidate, found[candidate]


def written(source: str, key: Key, tile: Tile) -> str:
    """The table's source with another tile in one line."""
    entry = f'    ("{key[0]}", {key[1]}, {key[2]}): '
    fields = list(tile)
    while fields[3:] and fields[-1] == Tile(0, 0, 0)[len(fields) - 1]:
        fields.pop()
    line = f"{entry}Tile({', '.join(map(str, fields))}),"
    return re.sub(rf"^{re.escape(entry)}.*$", line, source, flags=re.MULTILINE)


app = typer.Typer(add_completion=False, rich_markup_mode="markdown")


@app.command(
    help="Search for faster tiles of the memory-bound kernels on this GPU.",
    epilog="""Examples:

    python benchmarks/tune.py

    python benchmarks/tune.py --kernels norm_forward --kernels cast --write""",
)
def main(
    kernels: Annotated[
        list[str] | None, typer.Option(help="Of these names only; repeat for several.")
    ] = None,
    write: Annotated[
        bool, typer.Option("--write", help="Rewrite the table in kernels/shared/tiles.py.")
    ] = False,
) -> None:
    if not torch.cuda.is_available():
        raise typer.BadParameter("tiles are measured on a GPU; there is none here")
    device = torch.device("cuda")
    table = Table("entry", "case", "present", "us", "best", "us")
    path = Path(_tiles.__file__)
    for case in Bench(FULL, device, quick=False).cases():
        if kernels and case.kernel not in kernels:
            continue
        for key in keys_of(case):
            before = TILES[key]
            best, fastest, present = search(case, key, device)
            what = f"{case.variant} {case.size}"
            table.add_row(
                str(key), what, str(tuple(before)), f"{present:.1f}", str(tuple(best)), f"{fastest:.1f}"
            )
            if write and best != before:
                path.write_text(written(path.read_text(), key, best))
                TILES[key] = best
    console = Console()
    console.width = max(console.width, 160)
    console.print(table)


if __name__ == "__main__":
    app()
