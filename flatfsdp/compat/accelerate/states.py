"""The folder that `FlatAccelerator.save_state` writes.

flatfsdp.json           names the save that is the folder's; replaced by one rename when a save is complete
save-<id>/              everything of one save: Accelerate's own files, and
save-<id>/flatfsdp-0/   the first sharded model and its optimizer, as `flatfsdp.checkpoint` writes them

The one before is removed after the rename, so that the folder holds a whole save at any moment.  Other files
in it are left alone.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from flatfsdp.checkpoint.durable import make_folder, sync_folder
from flatfsdp.contract.flat_shard import FLAT_SHARD
from flatfsdp.engine.whole.units import named_groups

_MARK = "flatfsdp.json"
_SAVE = re.compile("save-[0-9a-f]{12}")


class Mark(NamedTuple):
    """Metadata of a complete save.

    Attributes:
        save: name of its folder.
        models: number of sharded models.
        ranks: number of ranks that saved.
        step: Accelerate's count of microbatches, from which it derives the last one of a step.
    """

    save: str
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


def checkpoint_of(place: Path, number: int) -> Path:
    """The folder of a model and its optimizer; `number` counts the prepared models."""
    return place / f"flatfsdp-{number}"


def begin_save(folder: Path) -> str:
    """Makes the folder of a new save; returns its name."""
    name = f"save-{uuid.uuid4().hex[:12]}"
    make_folder(folder / name)
    return name


def end_save(folder: Path, mark: Mark) -> None:
    """Makes a complete save the folder's.

    Raises:
        OSError: if it cannot; `is_current` tells which save is the folder's then.
    """
    # Accelerate's own files; `flatfsdp.checkpoint` has brought its own to the disk.
    for path in (folder / mark.save).iterdir():
        if path.is_file():
            with open(path, "rb") as written:
                os.fsync(written.fileno())
    sync_folder(folder / mark.save)
    temporary = folder / f"{_MARK}.tmp"
    with open(temporary, "w") as file:
        json.dump(mark._asdict(), file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, folder / _MARK)
    sync_folder(folder)


def is_current(folder: Path, name: str) -> bool:
    """Whether this save is the folder's."""
    try:
        found = _read_mark(folder)
    except OSError:
        return False
    return found is not None and found.save == name


def remove_earlier(folder: Path, name: str) -> None:
    """Removes all saves of the folder but this one, and what killed ones have left."""
    for path in folder.iterdir():
        if _SAVE.fullmatch(path.name) and path.name != name:
            # What stays is removed by the next save.
            shutil.rmtree(path, ignore_errors=True)


def discard_save(folder: Path, name: str) -> None:
    """Removes what a failed save has written."""
    shutil.rmtree(folder / name, ignore_errors=True)


def remove_others(saved: Path, limit: int) -> None:
    """Removes automatically named checkpoints beside the one just saved, until `limit` are left.

    Those whose save did not complete go first, then the oldest.
    """
    others = sorted(
        (is_marked(path), number, path) for number, path in _numbered(saved.parent) if path != saved
    )
    for _, _, path in others[: max(0, len(others) + 1 - limit)]:
        # First of all, so that an interruption leaves none that looks complete.
        (path / _MARK).unlink(missing_ok=True)
        shutil.rmtree(path, ignore_errors=True)


def is_marked(folder: Path) -> bool:
    """Whether a save into the folder has completed."""
    return (folder / _MARK).is_file()


def mark_of(folder: Path, models: int) -> Mark:
    """The metadata of the folder's save.

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
    found = _read_mark(folder)
    if found is None:
        raise ValueError(f"{folder / _MARK} does not hold what was written there; load another checkpoint")
    if found.models != models:
        raise ValueError(f"{folder} has {found.models} sharded models, and {models} have been prepared")
    return found


def _read_mark(folder: Path) -> Mark | None:
    """The metadata that a save has left; None if the file holds anything else."""
    try:
        found = Mark(**json.loads((folder / _MARK).read_text()))
        return found if _SAVE.fullmatch(found.save) else None
    except (ValueError, TypeError):
        return None


def newest(folder: Path) -> Path:
    """The newest complete one of the automatically named checkpoints.

    Raises:
        ValueError: if there is none.
    """
    ended = [(number, path) for number, path in _numbered(folder) if is_marked(path)]
    if not ended:
        raise ValueError(f"{folder} has no checkpoint that FlatAccelerator.save_state has completed")
    return max(ended)[1]


def _numbered(folder: Path) -> list[tuple[int, Path]]:
    named = ((re.fullmatch(r"checkpoint_(\d+)", path.name), path) for path in folder.glob("checkpoint_*"))
    return [(int(match[1]), path) for match, path in named if match]
