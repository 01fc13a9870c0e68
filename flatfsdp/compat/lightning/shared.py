"""Checks and checkpoint folders shared by Fabric's strategy and the Trainer's.

Next: `flatfsdp.checkpoint` writes and reads them.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch.optim import Optimizer

from flatfsdp import checkpoint
from flatfsdp.checkpoint.ema import EMA
from flatfsdp.checkpoint.opening import OpenCheckpoint, open_checkpoint
from flatfsdp.checkpoint.saving import write
from flatfsdp.checkpoint.stages import raising_on_all, world_of
from flatfsdp.contract.claimed import TAKEN_AS
from flatfsdp.engine.whole.units import UnitModule

Path = str | os.PathLike[str]


def require_place(model: UnitModule, device: torch.device, world_size: int, way_out: str) -> None:
    """Checks that a model is sharded on Lightning's device and over its ranks.

    Args:
        model: the sharded model.
        device: Lightning's device.
        world_size: Lightning's number of ranks.
        way_out: the end of the message: how to shard it there.

    Raises:
        ValueError: if it is on another device, or over other ranks.
    """
    found, ranks = model.fsdp_state.shared.device, model.fsdp_state.grid.num_ranks
    if found != device:
        raise ValueError(f"the model is on {found}, and Lightning's device is {device}; {way_out}")
    if ranks != world_size:
        raise ValueError(
            f"the model is data parallel over {ranks} of {world_size} ranks, and Lightning gives each of "
            f"them other data; {way_out}"
        )


def require_current(optimizer: Optimizer) -> None:
    """Checks that an optimizer has the parameters of the sharded model.

    Raises:
        ValueError: if it was made before the model was sharded.
    """
    for parameter in (each for group in optimizer.param_groups for each in group["params"]):
        name = TAKEN_AS.of(parameter)
        if name is not None:
            raise ValueError(
                f"the optimizer has parameter {name}, which is in a flat buffer by now; make it after the "
                "model is sharded, of model.parameters() or flatfsdp.param_groups"
            )


def save_folder(
    path: Path,
    model: UnitModule,
    optimizer: Optimizer | None,
    ema: EMA | None,
    extra: dict[str, Any],
    *,
    overwrite: bool,
    weights_only: bool,
) -> None:
    """Writes a folder, each rank its part.  Collective.

    Args:
        path: the folder.
        model: the sharded model.
        optimizer: its optimizer, or None.
        ema: an average of its weights, or None.
        extra: what is to be saved beside them.
        overwrite: whether to replace a checkpoint in the folder.
        weights_only: whether to refuse an `extra` that needs weights_only=False when it is loaded.

    Raises:
        Exception: what `flatfsdp.checkpoint.save` raises, on every rank.
    """
    writer = checkpoint.Writer(path, overwrite=overwrite, extra=extra, weights_only=weights_only)
    write(writer, model, optimizer, ema)


def open_folder(
    path: Path, model: UnitModule, weights_only: bool | None
) -> tuple[OpenCheckpoint, dict[str, Any]]:
    """Opens a checkpoint, and reads its objects besides model and optimizer.  Collective.

    Args:
        path: the folder.
        model: the sharded model.
        weights_only: passed to `torch.load`; None means True.

    Raises:
        Exception: what `flatfsdp.checkpoint.load` raises before it changes anything, on every rank.
    """
    opened = open_checkpoint(path, *world_of(model))
    with raising_on_all(model):
        try:
            extra = opened.extra(weights_only is not False)
        except checkpoint.CheckpointError as error:
            raise checkpoint.CheckpointError(
                f"{error}; if you trust it, load it with weights_only=False"
            ) from None
    return opened, extra
