"""`save`: writes a model and its optimizer to a folder, completely or not at all.

In:   a model, or the stages of a pipeline that this rank has, and the optimizer.
Out:  a folder that `load` reads with any number of ranks.
Next: `writer.py` writes it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from flatfsdp.checkpoint.ema import EMA, sharded_average
from flatfsdp.checkpoint.errors import CheckpointError, first_failure, reason, require_folder_first
from flatfsdp.checkpoint.extra_state import modules as extra_state
from flatfsdp.checkpoint.optimizer_state import merged_groups
from flatfsdp.checkpoint.sharded import numbered, sharded_optimizer_state_dict, sharded_state_dict
from flatfsdp.checkpoint.stages import begin, check_names, lanes_of, of_each_stage, raising_on_all, world_of
from flatfsdp.checkpoint.store import place
from flatfsdp.checkpoint.writer import Writer, pickled
from flatfsdp.comm.checking.identity import Action
from flatfsdp.comm.paths import same_on_all_ranks
from flatfsdp.engine.whole.units import Model, named_groups


def save(
    path: str | os.PathLike[str],
    model: Model,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    ema: EMA | None = None,
    extra: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    digests: bool = True,
) -> None:
    """Saves model and optimizer to a folder; each rank writes its part.  Collective over all ranks.

    The save is complete or absent: if killed at any moment, the folder holds the old checkpoint, or all of
    the new one.  Every file has a digest, which `load` verifies, unless data files are saved without.

    Args:
        path: folder of the checkpoint, the same on all ranks, made if it does not exist; or its URL in a
            store that fsspec has a library for, such as s3://bucket/run.
        model: the model, or this rank's stages of a pipeline.
        optimizer: optimizer over all parameters of `model`.
        ema: an average of the weights of `model`.
        extra: further data, such as the step, for `load` to return: tensors, numbers, strings, and lists and
            dicts of them.  The first rank's is written.
        overwrite: whether to replace a checkpoint in the folder; the old one stays loadable until the new one
            is complete.
        digests: whether to hash data files while they are written, the same on all ranks.  If not, a save
            takes less time, and `load` finds a file that is missing or cut off, but not a flipped bit in it.

    Raises:
        FileExistsError: if the folder holds a checkpoint and is not to be overwritten.
        RuntimeError: inside `EMA.averaged`, if an optimizer or an average is passed.
        ValueError: if fsspec does not know the URL, or ranks pass different paths; if some units are spread
            over fewer ranks than others; if two stages have parameters of the same name.
        ModuleNotFoundError: if the URL's library is not installed.
        TypeError: if `path` is a model; if `load` would refuse `extra`, an option of the optimizer, or the
            extra state of a module.
        CheckpointError: if a rank could not write, with the system's reason; if ranks pass different
            `digests`.
        All of them are raised on every rank, and the old checkpoint can still be loaded.
    """
    require_folder_first(path, "save")
    begin(model, Action.SAVE)
    world, device = world_of(model)
    folder = same_on_all_ranks(place, path, [world], device)
    write(Writer(folder, overwrite=overwrite, extra=extra, digests=digests), model, optimizer, ema)


def write(
    writer: Writer, model: Model, optimizer: torch.optim.Optimizer | None, ema: EMA | None = None
) -> None:
    """Saves with this writer, which has `extra` already; raises like `save`."""
    write_state(writer, sharded_training_state(model, optimizer, ema))


def write_state(writer: Writer, state: dict[str, Any], group: dist.ProcessGroup | None = None) -> None:
    """Saves a state dict; raises like `save`.  Collective over `group`, by default over all ranks."""
    try:
        dcp.save(state, storage_writer=writer, process_group=group)
    except dcp.CheckpointException as failed:
        writer.discard()
        rank, error = first_failure(failed)
        # The writer's own refusals; a FileExistsError of the system has an errno.
        if isinstance(error, TypeError) or (isinstance(error, FileExistsError) and error.errno is None):
            raise error from None
        raise CheckpointError(
            f"the checkpoint {writer.path} was not saved: rank {rank}: {reason(error)}"
        ) from None


def sharded_training_state(
    model: Model, optimizer: torch.optim.Optimizer | None = None, ema: EMA | None = None
) -> dict[str, Any]:
    """State dict that `save` writes, for `dcp.async_save`.  Collective over all ranks.

        state = sharded_training_state(model, optimizer)
        writer = Writer("out/step-100", extra={"step": 100})
        saved = dcp.async_save(state, storage_writer=writer, process_group=gloo_group)

    Returns:
        {"model": `sharded_state_dict`, "optimizer": `sharded_optimizer_state_dict` with the parameter groups
        of all stages, "ema" if there is an average, "modules" if this rank saves extra state of some modules,
        as tensors and JSON, and "lanes" if the model has lanes}.

    Arguments and errors are those of `save`.
    """
    check_names(model, Action.SAVE)
    goes_on = optimizer is not None or ema is not None
    if goes_on and any(group.master.is_average for _, group in named_groups(model)):
        raise RuntimeError(
            "inside EMA.averaged() the model has the averaged weights, and a checkpoint of a run needs the "
            "trained ones: save it outside, or the model alone inside"
        )
    state: dict[str, Any] = {"model": sharded_state_dict(model)}
    if (lanes := lanes_of(model)) is not None:
        state["lanes"] = asdict(lanes)
    if extra_states := extra_state.packed_states(model):
        state[extra_state.SECTION] = extra_states
    if ema is not None:
        state["ema"] = sharded_average(ema, ema.shards)
    if optimizer is None:
        return state
    with raising_on_all(model):
        for group in optimizer.param_groups:
            for option, value in group.items():
                if option != "params":
                    pickled(value, f"the optimizer's {option}")
    state["optimizer"] = sharded_optimizer_state_dict(model, optimizer)
    groups = state["optimizer"]["param_groups"]
    of_stages = of_each_stage([groups[number] for number in sorted(groups, key=int)], model)
    state["optimizer"]["param_groups"] = numbered(merged_groups(of_stages))
    return state
