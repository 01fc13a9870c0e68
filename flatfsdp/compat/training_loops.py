"""What the training loops of other libraries share: Lightning's, Accelerate's, and transformers' Trainer's.

In:   a model, an optimizer and a folder, as a loop hands them over.
Out:  the model sharded as DistributedDataParallel wraps it; what ranks agree on; or an error with a way out.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from flatfsdp import checkpoint
from flatfsdp.checkpoint.opening import OpenCheckpoint, open_checkpoint
from flatfsdp.checkpoint.stages import raising_on_all, world_of
from flatfsdp.comm.objects import broadcast_object
from flatfsdp.contract.claimed import TAKEN_AS
from flatfsdp.engine.api.shard import shard
from flatfsdp.engine.api.wrap import WrapPolicy
from flatfsdp.options import Options

M = TypeVar("M", bound=nn.Module)
T = TypeVar("T")


def require_possible(who: str, asked: Iterable[tuple[str, object, str]]) -> None:
    """Checks that nothing is asked for that FlatFSDP cannot do.

    Args:
        who: the class that the user called.
        asked: what it cannot do, whether that is asked for, and an alternative.

    Raises:
        ValueError: a line for each thing that is asked for.
    """
    reasons = [f"{who} cannot do {what}: {instead}" for what, is_asked, instead in asked if is_asked]
    if reasons:
        raise ValueError("\n".join(reasons))


def shard_as_ddp(model: M, policy: WrapPolicy | None, device: torch.device, options: Options) -> M:
    """Shards a model on the loop's device, from the first rank's values unless options say otherwise."""
    # As under DistributedDataParallel: programs need not seed all ranks alike.
    options = {"sync_module_states": True, **options, "device": device}
    return shard(model, policy, **options)


def require_place(model: Any, device: torch.device, world_size: int, library: str, way_out: str) -> None:
    """Checks that a model is sharded on the loop's device and over all its ranks.

    Args:
        model: the sharded model.
        device: the library's device.
        world_size: the library's number of ranks.
        library: its name.
        way_out: the end of the message: how to shard the model there.

    Raises:
        ValueError: if it is on another device, or over other ranks.
    """
    found, ranks = model.fsdp_state.shared.device, model.fsdp_state.grid.num_ranks
    if found != device:
        raise ValueError(f"the model is on {found}, and {library}'s device is {device}; {way_out}")
    if ranks != world_size:
        theirs = f"over {ranks} of {world_size} ranks, and {library} gives each of them other data"
        raise ValueError(f"the model is data parallel {theirs}; {way_out}")


def require_no_checkpoint_io(plugin: Any, instead: str) -> None:
    """Checks that Lightning was given no plugin to write checkpoints with, which would not be asked.

    Raises:
        ValueError: if it was.
    """
    if plugin is not None and type(plugin).__name__ != "TorchCheckpointIO":
        name = type(plugin).__name__
        raise ValueError(
            f"FlatFSDPStrategy writes checkpoints itself, and not by {name}; leave it out: {instead}"
        )


def require_current(optimizer: Optimizer, way_out: str) -> None:
    """Checks that an optimizer has the parameters of the sharded model.

    Raises:
        ValueError: if the model was sharded after the optimizer was made.
    """
    for name in (TAKEN_AS.of(each) for group in optimizer.param_groups for each in group["params"]):
        if name is not None:
            cause = "of a model that was sharded after the optimizer was made"
            raise ValueError(f"the optimizer has parameter {name} {cause}; {way_out}")


def plain_optimizer(optimizer: Any) -> Optimizer:
    """The optimizer inside Accelerate's wrapper."""
    while type(optimizer).__name__ == "AcceleratedOptimizer":
        optimizer = optimizer.optimizer
    found: Optimizer = optimizer
    return found


def on_first_rank(model: nn.Module, do: Callable[..., T], *args: Any) -> T:
    """Calls a function on the first rank, and returns or raises on all what it does there.  Collective."""
    world, device = world_of(model)
    result: T | None = None
    with raising_on_all(model):
        if world.rank == 0:
            result = do(*args)
    told: T = broadcast_object(result, [world], device)
    return told


def open_folder(
    path: str | os.PathLike[str], model: nn.Module, weights_only: bool | None
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
            way_out = "if you trust it, load it with weights_only=False"
            raise checkpoint.CheckpointError(f"{error}; {way_out}") from None
    return opened, extra


@contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    """Context in which attributes of `owner` have other values."""
    before = {name: getattr(owner, name) for name in values}
    vars(owner).update(values)
    try:
        yield
    finally:
        vars(owner).update(before)
