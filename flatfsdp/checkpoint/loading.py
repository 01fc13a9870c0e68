"""`load`: reads a checkpoint into a model and its optimizer if it is whole and fits; else changes nothing.

In:   a folder that `save`, or plain torch.distributed.checkpoint, has written.
Out:  the model's shards, filled in place; the optimizer's state.

    open       `.metadata`, manifest and extra: one rank reads, all decode                 opening.py
    fit        names, shapes, dtypes, lanes                                                fit.py
    verify     digests of data files, in other threads, while ...                          opening.py
    read       ... all but the model's own tensors are read, to tensors of their own
    change     optimizer, model and extra state, once all ranks know that all files are whole
"""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from flatfsdp.checkpoint import fit
from flatfsdp.checkpoint.ema import EMA, check_average_fits, sharded_average
from flatfsdp.checkpoint.errors import CheckpointError, first_failure, reason, require_folder_first
from flatfsdp.checkpoint.extra_state import modules as extra_state
from flatfsdp.checkpoint.local import adopt_late_buffers
from flatfsdp.checkpoint.opening import OpenCheckpoint, open_checkpoint
from flatfsdp.checkpoint.optimizer_state import SlotState, loadable_state, trained_masters
from flatfsdp.checkpoint.reader import Reader, place_for
from flatfsdp.checkpoint.sharded import owners_of, sharded_slot, sharded_state_dict
from flatfsdp.checkpoint.stages import begin, check_names, lanes_of, raising_on_all, world_of
from flatfsdp.comm.checking.identity import Action
from flatfsdp.engine.storage.master import MasterShard
from flatfsdp.engine.whole.units import Model, named_groups, stages_of


def load(
    path: str | os.PathLike[str],
    model: Model,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    ema: EMA | None = None,
    accept: Collection[fit.Accepted] = (),
    verify: bool = True,
) -> dict[str, Any]:
    """Loads a checkpoint of `save`, on any number of ranks of each kind.  Collective over all ranks.

    Executes nothing of what it reads.

    Args:
        path: folder of the checkpoint, the same on all ranks; or its URL, see `save`.
        model: the model, or this rank's stages of a pipeline.
        optimizer: optimizer over all parameters of `model`; None leaves its state in the file.
        ema: an average of the weights of `model`, to be filled with the saved one.
        accept: differences to accept.  "dtype": convert values to the model's dtypes.  "surplus": leave out
            entries that no stage of the model has.  "optimizer": take the state of another class of
            optimizer.  "lanes": go on with other lanes, and so with other bits than if the run had never
            been interrupted.
        verify: compare the contents of all files with their digests; without it, only their presence and
            lengths.  A checkpoint of plain torch.distributed.checkpoint has no digests, and the data files of
            one that was saved with digests=False have none.

    Returns:
        The `extra` that was saved, on every rank; {} if there was none.

    Raises:
        TypeError: if `path` is a model.
        ModuleNotFoundError: if the URL's library is not installed.
        FileNotFoundError: if the folder does not exist.
        DamagedCheckpoint: if a file is missing or damaged, or the save did not end.
        CheckpointError: if something cannot be read, or reading it could run code; if a rank does not see the
            folder; if model and checkpoint have different lanes.
        ValueError: if fsspec does not know the URL, or ranks pass different paths; if model, optimizer or
            parameter groups are not those that were saved; for unknown values in `accept`; if two stages have
            parameters of the same name.
        All of them are raised on every rank, with nothing changed.  Only if memory runs out, or files become
        unreadable after their verification, may model and optimizer be loaded in part.
    """
    require_folder_first(path, "load")
    fit.check_accepted(accept)
    begin(model, Action.LOAD)
    opened = open_checkpoint(path, *world_of(model))
    with raising_on_all(model):
        extra = opened.extra()
    load_opened(opened, model, optimizer, accept, ema=ema, verify=verify)
    return extra


def load_opened(
    opened: OpenCheckpoint,
    model: Model,
    optimizer: torch.optim.Optimizer | None,
    accept: Collection[str] = (),
    *,
    ema: EMA | None = None,
    verify: bool = True,
) -> None:
    """Loads an opened checkpoint, of which only data files are still to be read; raises like `load`."""
    names = check_names(model, Action.LOAD)
    fit.check_model_fits(opened, model, accept)
    extra_state.check_fits(opened, model, accept)
    own_lanes = lanes_of(model)
    target: dict[str, Any] = {
        extra_state.SECTION: extra_state.places(opened),
        "lanes": {name: place_for(about) for (name,), about in opened.entries("lanes").items()},
    }
    kept: _Kept | None = None
    shards: list[Tensor] = []
    if optimizer is not None:
        kept = _places_of_optimizer(opened, model, optimizer, names, accept)
        target["optimizer"] = kept.target
    if ema is not None:
        with raising_on_all(model):
            check_average_fits(opened, ema)
            shards = [torch.zeros_like(shard) for shard in ema.shards]
        target["ema"] = sharded_average(ema, shards)
    with opened.verified(*world_of(model), compares_digests=verify) as verdict:
        try:
            if any(target.values()):
                _read(opened, target)
        except (Exception, dcp.CheckpointException):
            # Our verdict names the damaged file; torch's error does not.
            verdict()
            raise
        verdict()
    with raising_on_all(model):
        fit.check_lanes_fit(target["lanes"], own_lanes, accept)
        extra_states = extra_state.unpacked(model, target[extra_state.SECTION])
    if optimizer is not None and kept is not None:
        _fill_optimizer(kept, model, optimizer, accept)
    if ema is not None:
        torch._foreach_copy_(ema.shards, shards)
        ema.updates = target["ema"]["updates"]
    tensors = (each for each in fit.saved_in(opened).items() if isinstance(each[1], TensorStorageMetadata))
    saved = {name: about.size for name, about in tensors}
    with raising_on_all(model):
        absent = {name for stage in stages_of(model) for name in adopt_late_buffers(stage, saved)}
    state = {key: value for key, value in sharded_state_dict(model).items() if key not in absent}
    _read(opened, {"model": state})
    with raising_on_all(model):
        extra_state.give(model, extra_states)
    for _, group in named_groups(model):
        group.master.loaded()


def _read(opened: OpenCheckpoint, target: dict[str, Any]) -> None:
    """Reads into `target`.  Collective over all ranks.

    Raises:
        CheckpointError: on every rank, if one of them cannot read something.
    """
    reader = Reader(opened.folder, metadata=opened.metadata)
    # The planner's default drops tensors of which this rank has nothing, and then expects an older format.
    planner = dcp.DefaultLoadPlanner(flatten_sharded_tensors=False)
    try:
        dcp.load(target, storage_reader=reader, planner=planner)
    except dcp.CheckpointException as failed:
        rank, error = first_failure(failed)
        raise CheckpointError(
            f"the checkpoint {opened.folder} cannot be read: rank {rank}: {reason(error)}"
        ) from None


class _Kept(NamedTuple):
    """The optimizer's part of a checkpoint, until all ranks know that its files are whole.

    Attributes:
        target: what `dcp.load` fills: "state", "param_groups" by number, and the name of the "class", if the
            checkpoint has it.
        states: states by parameter name.
        shards: shards of each state with as many elements as the parameter, which `target` aliases.
    """

    target: dict[str, Any]
    states: dict[str, SlotState]
    shards: dict[tuple[MasterShard, str], Tensor]


def _places_of_optimizer(
    opened: OpenCheckpoint,
    model: Model,
    optimizer: torch.optim.Optimizer,
    names: set[str],
    accept: Collection[str],
) -> _Kept:
    """Allocates tensors for the optimizer's state.  Collective over all ranks.

    Args:
        opened: the checkpoint.
        model: the model, or this rank's stages of a pipeline.
        optimizer: optimizer to be loaded later.
        names: names of the parameters of all stages.
        accept: differences to accept.

    Raises:
        ValueError: on every rank, if there is none.
    """
    masters = trained_masters(model, optimizer)
    slots = [(prefix + slot.name, slot, master) for prefix, master in masters for slot in master.layout.slots]
    own = {name for name, _, _ in slots}
    kept = _Kept({"state": {}, "param_groups": {}}, {}, {})
    for (kind, *keys), about in opened.entries("optimizer").items():
        if kind == "class":
            kept.target[kind] = None
        elif kind == "param_groups":
            number, option = keys
            kept.target[kind].setdefault(number, {})[option] = place_for(about)
        elif kind == "state" and (keys[0] in own or (keys[0] not in names and "surplus" not in accept)):
            # Other stages read theirs; an entry of no stage is an error, unless surplus is accepted.
            name, key = keys
            state = kept.states.setdefault(name, SlotState(0, {}, {}))
            places = kept.target[kind].setdefault(name, {})
            if isinstance(about, TensorStorageMetadata) and len(about.size) > 0:
                state.elements[key] = about.properties.dtype
            else:
                state.values[key] = places[key] = place_for(about)
    if not kept.target["param_groups"]:
        raise ValueError("the checkpoint has no optimizer state; save it with save(path, model, optimizer)")
    owners = owners_of(master for _, master in masters)
    with raising_on_all(model):
        for name, slot, master in slots:
            for key, dtype in kept.states[name].elements.items() if name in kept.states else ():
                if (master, key) not in kept.shards:
                    kept.shards[master, key] = torch.zeros_like(master.flat.detach(), dtype=dtype)
                kept.target["state"][name][key] = sharded_slot(master, slot, kept.shards[master, key], owners)
    return kept


def _fill_optimizer(
    kept: _Kept, model: Model, optimizer: torch.optim.Optimizer, accept: Collection[str]
) -> None:
    """Loads into the optimizer what was read.  Collective over all ranks.

    Raises:
        ValueError: on every rank, if its class (unless accepted), names or parameter groups do not fit on one
            of them.
    """
    own, saved = type(optimizer).__name__, kept.target.get("class")
    with raising_on_all(model):
        if saved not in (None, own) and "optimizer" not in accept:
            raise ValueError(
                f"the checkpoint has the state of {saved}, and the optimizer is {own}; load the model alone, "
                "or let the optimizer take the state over as it is with accept=('optimizer',)"
            )
    for name, state in kept.states.items():
        read = kept.target["state"][name]
        state.values.update({key: read[key] for key in state.values})
    groups = kept.target["param_groups"]
    # The ranks of a stage raise together; other stages learn of it here.
    with raising_on_all(model):
        fitted = loadable_state(
            trained_masters(model, optimizer),
            optimizer,
            kept.states,
            [groups[number] for number in sorted(groups, key=int)],
            lambda _, master, key, __: kept.shards[master, key],
        )
    with raising_on_all(model):
        optimizer.load_state_dict(fitted)
