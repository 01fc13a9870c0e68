"""Faults on purpose, from the command line: of ranks and disks at random, or of one kind.

\b
    python -m tests.support.faults --minutes 60
    python -m tests.support.faults --seed 3 --trial 141
    python -m tests.support.faults kills --way plain --every 40
    python -m tests.support.faults random-kills --count 200 --seed 7
    python -m tests.support.faults random-kills --way background --count 200
    python -m tests.support.faults damage --count 200
    python -m tests.support.faults mismatches

Each prints what it counts, ends with what was wrong, and fails if anything was.
"""

from __future__ import annotations

import time
from collections import Counter
from importlib.util import find_spec
from typing import Annotated

import typer

from tests.support.faults.damage import KINDS, random_damage
from tests.support.faults.full import random_full_disks
from tests.support.faults.kills import ALL, Kill, Kills, enumerated
from tests.support.faults.kills import random_kills as killed_at_random
from tests.support.faults.ranks.at_random import FAULTS
from tests.support.faults.ranks.at_random import trial as random_trial
from tests.support.faults.ranks.mismatches import MISMATCHES
from tests.support.faults.training import WAYS
from tests.support.progress import Progress

app = typer.Typer(add_completion=False, help=__doc__, rich_markup_mode=None, invoke_without_command=True)

Ranks = Annotated[int, typer.Option(help="Ranks that save, and that load.")]
Seed = Annotated[int, typer.Option(help="Another one makes other choices.")]


@app.callback()
def at_random(
    context: typer.Context,
    minutes: Annotated[float, typer.Option(help="How long.")] = 1.0,
    seed: Seed = 0,
    trial: Annotated[int, typer.Option(help="Repeat this one; -1 for all.")] = -1,
) -> None:
    if context.invoked_subcommand is None:
        if trial >= 0:
            _repeat(seed, trial)
        else:
            _run_at_random(minutes, seed)


def _repeat(seed: int, number: int) -> None:
    one = random_trial(seed, number)
    typer.echo(f"{one.fault}: {one}")
    found, verdict = one.run()
    for rank, each in enumerate(found):
        typer.echo(f"rank {rank}: {each.how} after {each.seconds:.1f} s {each.losses}\n{each.message}")
    typer.echo(verdict)
    _end([] if verdict in GOOD else [verdict])


def _run_at_random(minutes: float, seed: int) -> None:
    """Ranks and, after each of their faults once, disks."""
    progress, counts, wrong = Progress("faults"), Counter[str](), list[str]()
    deadline, number = time.monotonic() + 60 * minutes, 0

    def line() -> str:
        return f"tried {counts.total()}, " + ", ".join(f"{counts[each]} {each}" for each in SHOWN)

    while time.monotonic() < deadline:
        one = random_trial(seed, number)
        found, verdict = one.run()
        counts[verdict] += 1
        if verdict not in GOOD:
            said = "; ".join(f"rank {rank} {each.how}: {each.message}" for rank, each in enumerate(found))
            wrong.append(f"--seed {seed} --trial {number}, {one.fault}, is {verdict}: {said}")
            typer.echo(wrong[-1])
        progress.show(line())
        number += 1
        if number % len(FAULTS) == 0:
            before = len(wrong)
            wrong += _disks(seed + number, counts)
            for each in wrong[before:]:
                typer.echo(each)
    progress.show(line(), at_once=True)
    _end(wrong)


def _disks(seed: int, counts: Counter[str]) -> list[str]:
    """A file damaged in each way, disks that are full, and saves that are killed; returns what was wrong."""
    *_, (damaged, wrong) = random_damage(len(KINDS), seed)
    *_, of_full_ones = random_full_disks(2, seed)
    wrong += of_full_ones
    counts["named"] += 2 - len(of_full_ones)
    with Kills(2) as trials:
        for _ in killed_at_random(trials, 2, seed, ["plain", "manager"]):
            pass
        wrong += trials.count.wrong
        counts["right"] += trials.count.tried - len(trials.count.wrong)
    counts["named"] += damaged.total()
    counts["silent"] += len(wrong)
    return wrong


GOOD = ("right", "named")
SHOWN = ("named", "right", "silent", "false alarm", "unnamed", "hung", "aborted", "backend's words")


@app.command()
def kills(
    way: Annotated[str, typer.Option(help=f"One of {', '.join(WAYS)}; all by default.")] = "",
    every: Annotated[int, typer.Option(help="Take every so many of the writes to one data file.")] = 40,
    ranks: Ranks = 2,
    slow: Annotated[int, typer.Option(help="A rank whose writes take longer; -1 for none.")] = -1,
) -> None:
    """Kill a save after each of its operations on files, on each rank and on all of them."""
    wrong: list[str] = []
    for name in [way] if way else _available():
        for is_same_folder in (True,) if WAYS[name].is_of_runs else (True, False):
            with Kills(ranks) as trials:
                where = "the same folder" if is_same_folder else "a new folder"
                plan = Kill(name, is_same_folder, 0, 0, slow if slow >= 0 else None)
                progress = Progress(f"{name}, {where}")
                for kill, digests in enumerated(trials, plan, [ALL, *range(ranks)], every):
                    trials.kill(kill, digests)
                    progress.show(trials.count)
                progress.show(trials.count, at_once=True)
                wrong += trials.count.wrong
    _end(wrong)


@app.command()
def random_kills(
    way: Annotated[str, typer.Option(help=f"One of {', '.join(WAYS)}; all by default.")] = "",
    count: Annotated[int, typer.Option(help="How many.")] = 200,
    seed: Seed = 0,
    ranks: Ranks = 2,
) -> None:
    """Kill training that saves after every step to one folder, at random times, on one rank or all."""
    # To go on from an older step is not to train.
    ways = [way] if way else [name for name in _available() if name != "resume"]
    with Kills(ranks) as trials:
        progress = Progress("at random times")
        for so_far in killed_at_random(trials, count, seed, ways):
            progress.show(so_far)
        progress.show(trials.count, at_once=True)
        _end(trials.count.wrong)


@app.command()
def damage(
    count: Annotated[int, typer.Option(help="How many.")] = 200, seed: Seed = 0, ranks: Ranks = 2
) -> None:
    """Damage one file of a checkpoint, in every way that storage does, and load it."""
    progress, wrong = Progress("damage"), list[str]()
    kinds = None
    for kinds, wrong in random_damage(count, seed, ranks):
        progress.show(f"{kinds.total()} files damaged, {len(wrong)} wrong")
    progress.show(
        f"{kinds.total()} files damaged, {len(wrong)} wrong: {dict(kinds)}" if kinds else "", at_once=True
    )
    _end(wrong)


@app.command()
def mismatches(
    only: Annotated[str, typer.Option(help="Those whose name contains this.")] = "",
    markdown: Annotated[bool, typer.Option(help="Rows for the documentation.")] = False,
) -> None:
    """Run two ranks that differ in each of 51 ways, and tell how each of them ends."""
    wrong: list[str] = []
    start = time.monotonic()
    for name, mismatch in MISMATCHES.items():
        if only.lower() not in name.lower():
            continue
        found, verdict = mismatch.run()
        if markdown:
            hows = " | ".join(each.how for each in found)
            typer.echo(f"| {name} | {hows} | {max(each.seconds for each in found):.0f} s |")
        else:
            hows = ", ".join(f"{each.how} ({each.seconds:.1f} s)" for each in found)
            typer.echo(f"{name:64} {verdict:16} {hows}")
        if verdict not in ("right", "named"):
            said = "; ".join(f"rank {rank}: {each.message}" for rank, each in enumerate(found))
            wrong.append(f"{name}: {verdict}: {said}")
    typer.echo(f"{len(wrong)} of them wrong  ({time.monotonic() - start:.0f} s)")
    _end(wrong)


def _available() -> list[str]:
    has_fabric = any(find_spec(name) for name in ("lightning", "lightning_fabric"))
    return [name for name in WAYS if name != "fabric" or has_fabric]


def _end(wrong: list[str]) -> None:
    for each in wrong:
        typer.echo(each)
    raise typer.Exit(bool(wrong))


if __name__ == "__main__":
    app()
