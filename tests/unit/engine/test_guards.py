"""Modules that are engines, or belong to a unit, as far as no process group is needed to tell."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn.modules import module as modules_of_torch
from torch.optim import optimizer as optimizers_of_torch

from flatfsdp import FlatFSDP
from flatfsdp.compat.fairscale import FullyShardedDataParallel
from flatfsdp.contract.claimed import is_owned


class DeepSpeedEngine(nn.Module):
    """An engine that is not installed, by its name."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


class Engine(DeepSpeedEngine):
    """A class that somebody has derived from one."""


@pytest.mark.parametrize("kind", [DeepSpeedEngine, Engine])
def test_engines_of_other_libraries_are_known_by_name(kind: type[DeepSpeedEngine]) -> None:
    with pytest.raises(ValueError, match="DeepSpeedEngine around a model that FlatFSDP has sharded"):
        kind(nn.Sequential(FlatFSDP(nn.Linear(2, 2))))
    with pytest.raises(ValueError, match=r"0 is in the hands of DeepSpeedEngine.*plain module"):
        FlatFSDP(nn.Sequential(kind(nn.Linear(2, 2))))
    kind(nn.Linear(2, 2))


def test_the_interface_of_fairscale_is_no_other_engine() -> None:
    inner = FullyShardedDataParallel(nn.Linear(2, 2))
    FullyShardedDataParallel(nn.Sequential(inner, nn.Linear(2, 2)))


def test_copies_of_a_module_belong_to_no_unit() -> None:
    # Parts, which have parameters, refuse to be copied.
    plain = nn.Sequential(nn.ReLU())
    FlatFSDP(nn.Sequential(nn.Linear(2, 2), plain))
    copies = [copy.deepcopy(plain), pickle.loads(pickle.dumps(plain))]
    assert [is_owned(each) for each in (plain, *copies)] == [True, False, False]


def test_hooks_of_the_process_are_installed_once() -> None:
    def installed() -> tuple[int, int]:
        return (
            len(modules_of_torch._global_module_registration_hooks),
            len(optimizers_of_torch._global_optimizer_pre_hooks),
        )

    FlatFSDP(nn.Linear(2, 2))
    before = installed()
    FlatFSDP(nn.Linear(2, 2))
    assert installed() == before
    assert min(before) >= 1


def test_an_optimizer_that_has_no_parameter_of_a_unit_steps() -> None:
    FlatFSDP(nn.Linear(2, 2))
    weight = nn.Parameter(torch.ones(2, 2))
    groups = [{"params": [], "weight_decay": 0.1}, {"params": [weight], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    weight.grad = torch.ones(2, 2)
    optimizer.step()
    assert (weight < 1).all()
