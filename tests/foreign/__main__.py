"""The command: runs every subtest with PyTorch's `fully_shard` and with `shard`, and prints a table."""

from __future__ import annotations

import argparse
import json
import re
import textwrap
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.foreign.files import files_in, tests_in
from tests.foreign.source import LeftOut, translate
from tests.foreign.subtests import Engine, Outcome, run_subtest
from tests.support.ranks import RankFailure, run_ranks, stop_pools

ENGINES: tuple[Engine, ...] = ("fully_shard", "shard")
PATIENCE = 20.0
"""Seconds that a collective waits for a rank that has failed."""

COLUMNS = ("passed", "failed", "refused", "other interface", "skipped")
EXAMPLE = """\
example:
  git clone --depth 1 --branch v2.13.0 https://github.com/pytorch/pytorch
  python -m tests.foreign pytorch --json foreign.json
  python -m tests.foreign pytorch --only autograd --ranks 2

Take the tag of the torch that is installed. For Megatron-FSDP v2 pass a clone of Megatron-LM.

A subtest is
  passed           all its assertions held
  refused          FlatFSDP raised an error of its own: it does not do that, and says so
  other interface  it asks a parameter to be a DTensor, or calls what only the other engine has
  skipped          it needs a GPU, or more ranks
  failed           anything else
"""


@dataclass(frozen=True)
class Row:
    """One subtest with both engines."""

    file: str
    test: str
    subtest: str
    fully_shard: Outcome
    shard: Outcome


def main(arguments: list[str] | None = None) -> int:
    """Returns 1 if a subtest that `fully_shard` passes fails with `shard`, otherwise 0."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.foreign",
        description="Runs tests of PyTorch's FSDP2, or of Megatron-FSDP v2, against shard on CPU ranks.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "folder", type=Path, help="clone of PyTorch or Megatron-LM, or the folder of the tests"
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="files and tests whose names contain it")
    parser.add_argument("--ranks", type=int, default=4, help="number of ranks; some tests use fewer (4)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all outcomes there")
    chosen = parser.parse_args(arguments)

    rows, left_out = [], {}
    for file in files_in(chosen.folder.resolve()):
        for test in tests_in(file):
            if chosen.only in f"{file.name} {test}":
                left_out[file.name] = translate(file, for_shard=True).left_out
                for row in _run(file, test, chosen.ranks):
                    rows.append(row)
                    _print_row(row)
    stop_pools()
    _print_summary(rows, left_out)
    if chosen.json:
        content = {
            "subtests": [asdict(row) for row in rows],
            "left_out": {name: [each._asdict() for each in several] for name, several in left_out.items()},
        }
        chosen.json.write_text(json.dumps(content, indent=1))
    return int(any((row.fully_shard.status, row.shard.status) == ("passed", "failed") for row in rows))


def _run(file: Path, test: str, ranks: int) -> Iterator[Row]:
    index, subtests = 0, 1
    while index < subtests:
        outcomes = {engine: _on_ranks(file, test, index, engine, ranks) for engine in ENGINES}
        subtests = max(each.subtests for each in outcomes.values())
        subtest = next((each.subtest for each in outcomes.values() if each.subtest), "")
        yield Row(file.name, test, subtest, **outcomes)
        index += 1


def _on_ranks(file: Path, test: str, index: int, engine: Engine, ranks: int) -> Outcome:
    """The outcome on the rank that tells most."""
    world_size = ranks
    while True:
        try:
            outcomes = run_ranks(
                world_size, run_subtest, str(file), test, index, engine, ranks, patience=PATIENCE
            )
        except RankFailure as failure:
            return Outcome("failed", str(failure))
        if outcomes[0].status == "other ranks":
            world_size = outcomes[0].ranks
            continue
        places = {(each.status, each.why.partition(":")[0]) for each in outcomes}
        if len(places) > 1 or outcomes[0].status == "failed":
            # Ranks may have left collectives behind, in which others would take part.
            stop_pools()
        return min(outcomes, key=_tells_little)


def _tells_little(outcome: Outcome) -> tuple[bool, bool]:
    """Ranks that passed know least, then those that have waited for others in vain."""
    waited = re.search(r"time(d )?out|connection closed", outcome.why, re.IGNORECASE)
    return outcome.status in ("passed", "skipped"), waited is not None


def _print_row(row: Row) -> None:
    name = f"{row.file}  {row.test}" + (f"[{row.subtest}]" if row.subtest else "")
    print(f"{name}\n    fully_shard: {row.fully_shard.status:<16} shard: {row.shard.status}", flush=True)


def _print_summary(rows: list[Row], left_out: dict[str, list[LeftOut]]) -> None:
    print("\nWhy:")
    for engine in ENGINES:
        reasons: dict[str, list[Row]] = {}
        for row in rows:
            outcome: Outcome = getattr(row, engine)
            if outcome.status != "passed":
                key = f"{row.file} {row.test}: {outcome.status}\n      {_shortened(outcome.why)}"
                reasons.setdefault(key, []).append(row)
        for reason, those in reasons.items():
            print(f"  {engine}: {len(those)} x {reason}")
    print("\nAssertions that are left out for shard:")
    for file, several in left_out.items():
        for each in several:
            print(f"  {file}:{each.line}  {each.assertion}  ({each.reason})")
    print(f"\n{'':<44}{'':<12}" + "".join(f"{column:>17}" for column in COLUMNS))
    for file in left_out:
        for engine in ENGINES:
            count = Counter(getattr(row, engine).status for row in rows if row.file == file)
            print(f"{file:<44}{engine:<12}" + "".join(f"{count[column]:>17}" for column in COLUMNS))


def _shortened(text: str) -> str:
    """The first line of a message; `--json` has all of it."""
    return textwrap.shorten(text.strip().partition("\n")[0], 240)


if __name__ == "__main__":
    started = time.monotonic()
    code = main()
    print(f"\n{time.monotonic() - started:.0f} seconds")
    raise SystemExit(code)
