"""The files that `FlatAccelerator.save_state` writes beside Accelerate's own.

flatfsdp-0/      the first sharded model and its optimizer, as `flatfsdp.checkpoint` writes them
flatfsdp.json    written last, so that an interrupted save is not mistaken for a complete one
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from flatfsdp.contract.flat_shard import FLAT_SHARD
from flatfsdp.engine.units import named_groups

_MARK = "flatfsdp.json"


class Mark(NamedTuple):
    """Metadata of a complete save.

    Attributes:
        models: number of sharded models.
        ranks: number of ranks that saved.
        step: Accelerate's count of microbatches, from which it derives the last one of a step.
    """

    models: int
    ranks: int
    step: int


class Saved(NamedTuple):
    """The contents of one checkpoint.

    Attributes:
        model: a sharded model.
        optimizer: optimizer of all its parameters, without Accelerate's wrapper; None if there is none.
    """

    model: Any
    optimizer: torch.optim.Optimizer | None


def plain_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer inside Accelerate's wrapper."""
    while type(optimizer).__name__ == "AcceleratedOptimizer":
        optimizer = optimizer.optimizer
    found: torch.optim.Optimizer = optimizer
    return found


def pairs(models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> list[Saved]:
    """Pairs each of these sharded models with its optimizer.

    Raises:
        ValueError: if a model has several optimizers, or an optimizer has parameters of several models, or of
            a sharded model that is not in `models`.
    """
    found = []
    for model in models:
        own = _updated(model)
        of_model = [each for each in optimizers if not own.isdisjoint(_parameters(each))]
        if len(of_model) > 1:
            raise ValueError(
                f"{len(of_model)} optimizers have parameters of one {type(model).__name__}, and a checkpoint "
                "is of one: make one optimizer with several parameter groups"
            )
        if of_model and not own.issuperset(_parameters(of_model[0])):
            raise ValueError(
                f"an optimizer has parameters of this {type(model).__name__} and others, and a checkpoint is "
                "of one model and its optimizer: make an optimizer for each model, or one module of all of "
                "them"
            )
        found.append(Saved(model, of_model[0] if of_model else None))
    known = {id(saved.optimizer) for saved in found}
    for optimizer in optimizers:
        if id(optimizer) not in known and any(FLAT_SHARD.of(p) is not None for p in _parameters(optimizer)):
            raise ValueError(
                f"this {type(optimizer).__name__} has parameters of a sharded model that Accelerate does not "
                "know; give accelerator.prepare the model, too"
            )
    return found


def _updated(model: nn.Module) -> set[nn.Parameter]:
    """Tensors of a sharded model that an optimizer may update: parameters, or cuts by `param_groups`."""
    masters = [group.master for _, group in named_groups(model)]
    return {parameter for master in masters for parameter in master.parameters} | {*model.parameters()}


def _parameters(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def checkpoint_of(folder: Path, number: int) -> Path:
    """The folder of a model and its optimizer; `number` counts the prepared models."""
    return folder / f"flatfsdp-{number}"


def mark(folder: Path, value: Mark) -> None:
    """Marks the folder as a complete save."""
    (folder / _MARK).write_text(json.dumps(value._asdict()))


def unmark(folder: Path) -> None:
    """Removes the mark before the folder changes."""
    (folder / _MARK).unlink(missing_ok=True)


def is_marked(folder: Path) -> bool:
    """Whether a save into the folder has completed."""
    return (folder / _MARK).is_file()


def mark_of(folder: Path, models: int) -> Mark:
    """The metadata that a complete save has left.

    Args:
        folder: the folder.
        models: expected number of sharded models.

    Raises:
        ValueError: if no save of FlatAccelerator has completed there, or the number of models differs.
    """
    if not is_marked(folder):
        raise ValueError(
            f"{folder} has no {_MARK}: it was not written by FlatAccelerator.save_state, or that was stopped "
            "before its end"
        )
    found = Mark(**json.loads((folder / _MARK).read_text()))
    if found.models != models:
        raise ValueError(f"{folder} has {found.models} sharded models, and {models} have been prepared")
    return found


def newest(folder: Path) -> Path:
    """The newest complete one of the automatically named checkpoints.

    Raises:
        ValueError: if there is none.
    """
    named = ((re.fullmatch(r"checkpoint_(\d+)", path.name), path) for path in folder.glob("checkpoint_*"))
    ended = [(int(match[1]), path) for match, path in named if match and is_marked(path)]
    if not ended:
        raise ValueError(f"{folder} has no checkpoint that FlatAccelerator.save_state has completed")
    return max(ended)[1]
