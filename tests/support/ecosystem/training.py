"""The same steps in plain PyTorch, in one process on the data of all ranks, and sharded."""

from __future__ import annotations

import functools
import importlib
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flatfsdp import microbatches
from tests.support.ecosystem.families import Batch, Family, batches_of
from tests.support.ecosystem.fused import FUSED, MODELS
from tests.support.models import update

STEPS = 3
LEARNING_RATE = 1e-2


class Trained(NamedTuple):
    """A finished run.

    Attributes:
        losses: of this rank's microbatches, in order.
        state: the state dict at the end.
    """

    losses: list[float]
    state: dict[str, Tensor]


def adamw(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LEARNING_RATE)


def train_sharded(model: Any, rank: int, steps: int = STEPS) -> Trained:
    """Trains a model that FlatFSDP has sharded, wrapped or in place."""
    optimizer, losses = adamw(model), []
    for step in range(steps):
        for batch in microbatches(model, batches_of(rank, step)):
            loss = model(**batch).loss
            loss.backward()
            losses.append(loss.item())
        update(optimizer)
    return Trained(losses, model.state_dict())


def train_plain(model: Any, rank: int, world_size: int, steps: int = STEPS) -> Trained:
    """Gradients are added up over the microbatches of each rank, then averaged over ranks."""
    optimizer, losses = adamw(model), []
    for step in range(steps):
        of_ranks = []
        for each in range(world_size):
            optimizer.zero_grad()
            own = _forward_backward(model, batches_of(each, step))
            losses += own if each == rank else []
            of_ranks.append([p.grad for group in optimizer.param_groups for p in group["params"]])
        for group in optimizer.param_groups:
            for index, parameter in enumerate(group["params"]):
                parameter.grad = sum(grads[index] for grads in of_ranks) / world_size
        update(optimizer)
    return Trained(losses, model.state_dict())


def _forward_backward(model: Any, batches: list[Batch]) -> list[float]:
    losses = []
    for batch in batches:
        loss = model(**batch).loss
        loss.backward()
        losses.append(loss.item())
    return losses


@functools.cache
def plain(name: str, rank: int, world_size: int) -> Trained:
    """What sharded ones of `MODELS` and `FUSED` have to reach; computed once on each rank."""
    return train_plain({**FUSED, **MODELS}[name].build(), rank, world_size)


def read(family: Family, folder: Path, **options: Any) -> Any:
    """The model that plain transformers loads from the folder, if nothing is missing or surplus."""
    kind = getattr(importlib.import_module("transformers"), family.model)
    model, told = kind.from_pretrained(folder, local_files_only=True, output_loading_info=True, **options)
    assert not any(told.values()), told
    return model


def assert_same_training(found: Trained, expected: Trained) -> None:
    """In FP32 on two ranks, whose mean has one order: as far as element-wise kernels round alike."""
    assert found.losses == expected.losses
    assert list(found.state) == list(expected.state)
    assert_same_values(found.state, expected.state)


def assert_same_values(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    different = {
        name: float((found[name] - value).abs().max())
        for name, value in expected.items()
        if not torch.equal(found[name], value)
    }
    assert not different
