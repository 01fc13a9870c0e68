"""The work of sharding and loading grows with the number of parameters in a unit, not with its square."""

from __future__ import annotations

import cProfile
import pstats
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from flatfsdp import shard


def calls_in_flatfsdp(function: Callable[..., Any], *args: Any) -> int:
    """How many calls of our functions it takes."""
    profile = cProfile.Profile()
    profile.runcall(function, *args)
    stats = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    return sum(row[1] for (file, _, _), row in stats.items() if "flatfsdp" in file)


def layers(parameters: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(2, 2) for _ in range(parameters // 2)))


@pytest.mark.parametrize("does", ["shard", "load"])
def test_twice_the_parameters_are_twice_the_work(does: str) -> None:
    work = []
    for parameters in (100, 200):
        module = layers(parameters)
        state = module.state_dict()
        if does == "load":
            module = shard(module)
            module(torch.ones(1, 2))
            work.append(calls_in_flatfsdp(module.load_state_dict, state))
        else:
            work.append(calls_in_flatfsdp(shard, module))
    assert work[1] < 2.2 * work[0]
