"""`verify --world`: trains on several numbers of ranks, and compares all bits.

In:   the options of `verify`.
Out:  a `WorldPlan`, and of it a `Parity` with one row for each number of ranks, strategy and flag.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from math import lcm
from pathlib import Path
from typing import Any

from flatfsdp.cli.console import StepBar
from flatfsdp.cli.user_functions import function_named, with_own_layers
from flatfsdp.cli.verify import OF_LIBRARY
from flatfsdp.comm.lanes import Lanes
from flatfsdp.comm.launch import Device, Launch, Rank
from flatfsdp.models.gpt import GPTConfig
from flatfsdp.parity import Parity
from flatfsdp.parity.any_model import ModelJob
from flatfsdp.parity.switches import Sharding
from flatfsdp.parity.world import LEAST_LANES_OF_SELF_TEST, Spread, verify_world
from flatfsdp.profiling.step_time import environment
from flatfsdp.training.choices import PrecisionName, Strategy
from flatfsdp.training.jobs import Configuration, Settings, check_sizes, gpt_job

OF_WORLD = {"world", "lanes", "precision", "strategy", "device", "out", "json", *OF_LIBRARY}
"""Options of `verify` that apply to every model; a built-in one has its sizes beside them."""
OF_GPT = {"layers", "hidden", "heads", "seq", "batch", "data"}
OF_OWN = {"model", "batches"}


@dataclass(frozen=True)
class WorldPlan:
    """What to train, and on how many ranks.

    Attributes:
        worlds: numbers of ranks; the first one is what all others are compared with.
        lanes: lanes of a step.
        settings: sizes, length and data; `microbatches` counts those of all ranks together.
        given: options that are given on the command line; of a model of the user's own with its functions.
    """

    worlds: tuple[int, ...]
    lanes: Lanes
    precisions: tuple[PrecisionName, ...]
    strategies: tuple[Strategy, ...]
    settings: Settings[GPTConfig]
    given: dict[str, Any]

    def jobs(self, rank: Rank) -> Iterator[tuple[str, ModelJob, Sharding]]:
        """Yields the name, the job and the sharding of each model."""
        settings, given = self.settings, self.given
        sampler = None if "model" in given else settings.sampler()
        for precision in self.precisions:
            how = Configuration(None, precision)
            if sampler is not None:
                yield precision.value, gpt_job(settings, how, sampler, rank), how.sharding
                continue
            build = partial(with_own_layers, function_named(given["model"]), precision)
            job = ModelJob(
                build,
                function_named(given["batches"]),
                steps=settings.steps,
                microbatches=settings.microbatches,
                lr=settings.lr,
                seed=settings.seed,
            )
            yield precision.value, job, replace(how.sharding, cache=False)

    def spreads(self, usual: Sharding) -> list[Spread]:
        """All ways to spread one model; those on the first number of ranks come first."""
        found = []
        for ranks, strategy, flag in product(self.worlds, self.strategies, (True, False)):
            sharding = replace(usual, flag=flag, reshard=strategy is Strategy.zero3)
            word = f"{ranks} rank{'s' if ranks > 1 else ''}, {strategy.value}, flag {'on' if flag else 'off'}"
            found.append(Spread(word, sharding, ranks, ranks if strategy is Strategy.dp else 1))
        return found


def world_plan(
    world: str,
    lanes: int | None,
    device: Device,
    precisions: list[PrecisionName],
    strategies: list[Strategy],
    settings: Settings[GPTConfig],
    given: dict[str, Any],
) -> tuple[WorldPlan, Launch]:
    """Checks the options, and chooses those that are left out.

    Raises:
        ValueError: if an option does not apply, a number is none, or the lanes do not fit.
    """
    allowed = OF_WORLD | (OF_OWN if "model" in given else OF_GPT)
    useless = [f"--{name.replace('_', '-')}" for name in given if name not in allowed]
    if useless:
        raise ValueError(f"{useless[0]} does not apply to --world; leave it out")
    try:
        worlds = tuple(dict.fromkeys(map(int, world.split(","))))
    except ValueError:
        raise ValueError(f"--world is {world!r}; it takes numbers of ranks, such as 1,2,4") from None
    if len(worlds) < 2 or min(worlds) < 1:
        raise ValueError(f"--world is {world!r}; it takes two numbers of ranks or more, such as 1,2,4")
    least = LEAST_LANES_OF_SELF_TEST if "self_test" in given else 1
    if lanes is None:
        # The least multiple of all numbers of ranks that is enough.
        common = lcm(*worlds)
        lanes = common * -(-least // common)
    elif lanes < least:
        raise ValueError(
            f"--lanes is {lanes}, and --self-test needs {least}: two have one sum, whichever comes first"
        )
    of_step = Lanes(lanes)
    if any(of_step.number % ranks for ranks in worlds):
        raise ValueError(f"--lanes is {of_step.number}, which {worlds} ranks do not all divide")
    if "microbatches" not in given:
        settings = replace(settings, microbatches=2 * of_step.number)
    if settings.microbatches % of_step.number:
        raise ValueError(
            f"--microbatches is {settings.microbatches}, over all ranks; take a multiple of {of_step.number}"
        )
    if "model" not in given:
        for precision in precisions:
            check_sizes(settings, precision)
        settings.sampler()
    launch = Launch(max(worlds), device, deterministic=True)
    plan = WorldPlan(
        worlds, of_step, tuple(dict.fromkeys(precisions)), tuple(dict.fromkeys(strategies)), settings, given
    )
    return plan, launch


def worlds_on_rank(rank: Rank, payload: tuple[WorldPlan, Path]) -> Parity:
    """Runs all rows; every rank must call it, and all get the same verdicts.

    Args:
        rank: this rank, of as many as the largest number.
        payload: the plan, and the file of the report, which is written after every row.
    """
    plan, file = payload
    options = {**asdict(plan.settings), "lanes": plan.lanes.number, "worlds": list(plan.worlds)}
    parity = Parity([], {}, {"environments": [environment(rank)], "options": options})
    for name, job, usual in plan.jobs(rank):
        spreads = plan.spreads(usual)
        label = f"{name}: {len(spreads)} ways on {', '.join(map(str, plan.worlds))} ranks"
        with StepBar(label, len(spreads) * job.steps, rank.index == 0) as bar:
            self_test = "self_test" in plan.given
            about = {"name": name, "lanes": plan.lanes.number}
            rows = verify_world(
                job, plan.lanes, spreads, rank, self_test=self_test, on_step=bar.show, about=about
            )
            for row in rows:
                parity.rows.append(row)
                if rank.index == 0:
                    file.write_text(parity.json() + "\n")
            bar.conclude(parity.equal)
    return parity
