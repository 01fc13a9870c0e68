"""`load`: reads a checkpoint into a model and its optimizer if it is whole and fits; else changes nothing.

In:   a folder that `save`, or plain torch.distributed.checkpoint, has written.
Out:  the model's shards, filled in place; the optimizer's state.

    open       `.metadata`, manifest and extra: one rank reads, all decode                 opening.py
    fit        names, shapes, dtypes                                                       fit.py
    verify     digests of data files, in other threads, while ...                          verification.py
    read       ... the optimizer's state is read, to tensors of its own
    change     optimizer, model and extra state, once all ranks know that all files are whole
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from flatfsdp.checkpoint.averages import check_average_fits, fill_average, sharded_average
from flatfsdp.checkpoint.ema import EMA
from flatfsdp.checkpoint.errors import CheckpointError, first_failure, reason, require_folder_first
from flatfsdp.checkpoint.extra_state import (
    SECTION,
    check_extra_fits,
    give_extra_state,
    places_of_extra_state,
    unpacked_extra_state,
)
from flatfsdp.checkpoint.fit import (
    Accepted,
    check_accepted,
    check_model_fits,
    check_optimizer_fits,
    saved_shapes,
)
from flatfsdp.checkpoint.local import adopt_late_buffers
from flatfsdp.checkpoint.opening import OpenCheckpoint, open_checkpoint
from flatfsdp.checkpoint.optimizer_state import SlotState, loadable_state, trained_masters
from flatfsdp.checkpoint.reader import Reader
from flatfsdp.checkpoint.sharded import owners_of, sharded_slot, sharded_state_dict
from flatfsdp.checkpoint.stages import begin, check_names, raising_on_all, world_of
from flatfsdp.checkpoint.verification import Verification
from flatfsdp.comm.checking.identity import Action
from flatfsdp.engine.storage.master import MasterShard
from flatfsdp.engine.whole.units import Model, named_groups, stages_of


def load(
    path: str | os.PathLike[str],
    model: Model,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    ema: EMA | None = None,
    accept: Collection[Accepted] = (),
    verify: bool = True,
) -> dict[str, Any]:
    """Loads a checkpoint of `save`, on any number of ranks of each kind.  Collective over all ranks.

    Executes nothing of what it reads.

    Args:
        path: folder of the checkpoint, the same on all ranks.
        model: the model, or this rank's stages of a pipeline.
        optimizer: optimizer over all parameters of `model`; None leaves its state in the file.
        ema: an average of the weights of `model`, to be filled with the saved one.
        accept: differences to accept.  "dtype": convert values to the model's dtypes.  "surplus": leave out
            entries that no stage of the model has.  "optimizer": take the state of another class of
            optimizer.
        verify: compare the contents of all files with their digests; without it, only their presence and
            lengths.  A checkpoint of plain torch.distributed.checkpoint has no digests.

    Returns:
        The `extra` that was saved, on every rank; {} if there was none.

    Raises:
        TypeError: if `path` is a model.
        FileNotFoundError: if the folder does not exist.
        DamagedCheckpoint: if a file is missing or damaged, or the save did not end.
        CheckpointError: if something cannot be read, or reading it could run code; if a rank does not see the
            folder.
        ValueError: if the path is a URL, or ranks pass different ones; if model, optimizer or parameter
            groups are not those that were saved; for unknown values in `accept`; if two stages have
            parameters of the same name.
        All of them are raised on every rank, with nothing changed.  Only if memory runs out, or files become
        unreadable after their verification, may model and optimizer be loaded in part.
    """
    require_folder_first(path, "load")
    check_accepted(accept)
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
    check_model_fits(opened.metadata, model, accept)
    check_extra_fits(opened.metadata, model, accept)
    if ema is not None:
        with raising_on_all(model):
            check_average_fits(opened.metadata, ema)
    groups = _saved_groups(opened.metadata) if optimizer is not None else {}
    kept = average = None
    places = places_of_extra_state(opened.metadata)
    with Verification(opened, *world_of(model), compares_digests=verify) as verification:
        try:
            if optimizer is not None:
                kept = _read_optimizer(opened, model, optimizer, names, groups, accept)
            if ema is not None:
                average = _read_average(opened, ema)
            if places:
                _read(opened, {SECTION: places})
        except (Exception, dcp.CheckpointException):
            # Our verdict names the damaged file; torch's error does not.
            verification.verdict()
            raise
        verification.verdict()
    with raising_on_all(model):
        extra_states = unpacked_extra_state(model, places)
    if optimizer is not None and kept is not None:
        check_optimizer_fits(kept.saved_class, optimizer, accept, model)
        _fill_optimizer(kept, model, optimizer)
    if ema is not None and average is not None:
        fill_average(ema, *average)
    saved = saved_shapes(opened.metadata)
    with raising_on_all(model):
        absent = {name for stage in stages_of(model) for name in adopt_late_buffers(stage, saved)}
    state = {key: value for key, value in sharded_state_dict(model).items() if key not in absent}
    _read(opened, {"model": state})
    with raising_on_all(model):
        give_extra_state(model, extra_states)
    for _, group in named_groups(model):
        group.master.loaded()


def _read(opened: OpenCheckpoint, state: dict[str, Any], **options: bool) -> None:
    """Reads into `state`.  Collective over all ranks.

    Args:
        opened: the checkpoint.
        state: state dict to fill.
        options: options of torch's DefaultLoadPlanner.

    Raises:
        CheckpointError: on every rank, if one of them cannot read something.
    """
    reader = Reader(opened.folder, metadata=opened.metadata)
    try:
        dcp.load(state, storage_reader=reader, planner=dcp.DefaultLoadPlanner(**options))
    except dcp.CheckpointException as failed:
        rank, error = first_failure(failed)
        raise CheckpointError(
            f"the checkpoint {opened.folder} cannot be read: rank {rank}: {reason(error)}"
        ) from None


def _read_average(opened: OpenCheckpoint, ema: EMA) -> tuple[list[Tensor], int]:
    """Reads the shards of the saved average, and its number of updates."""
    shards = [torch.zeros_like(shard) for shard in ema.shards]
    target = {"ema": sharded_average(ema, shards)}
    _read(opened, target, flatten_sharded_tensors=False)
    return shards, target["ema"]["updates"]


class _Kept(NamedTuple):
    """The optimizer's part of a checkpoint.

    Attributes:
        states: states by parameter name.
        shards: shards of each state with as many elements as the parameter.
        groups: parameter groups, in order.
        saved_class: name of the optimizer's class, if the checkpoint has it.
    """

    states: dict[str, SlotState]
    shards: dict[tuple[MasterShard, str], Tensor]
    groups: list[dict[str, Any]]
    saved_class: str | None


def _read_optimizer(
    opened: OpenCheckpoint,
    model: Model,
    optimizer: torch.optim.Optimizer,
    names: set[str],
    groups: dict[str, dict[str, Any]],
    accept: Collection[str],
) -> _Kept:
    """Reads the optimizer's state into new tensors.

    Args:
        opened: the checkpoint.
        model: the model, or this rank's stages of a pipeline.
        optimizer: optimizer to be loaded later.
        names: names of the parameters of all stages.
        groups: parameter groups from `_saved_groups`.
        accept: differences to accept.
    """
    metadata = opened.metadata
    masters = trained_masters(model, optimizer)
    owners = owners_of(master for _, master in masters)
    own = {prefix + slot.name for prefix, master in masters for slot in master.layout.slots}
    # Other stages read theirs; an entry of no stage is an error, unless surplus is accepted.
    states = {
        name: state
        for name, state in _saved_states(metadata).items()
        if name in own or (name not in names and "surplus" not in accept)
    }
    shards: dict[tuple[MasterShard, str], Tensor] = {}
    target: dict[str, Any] = {
        "state": {
            name: {key: _place(about) for key, about in state.values.items()}
            for name, state in states.items()
        },
        "param_groups": groups,
    }
    if ("optimizer", "class") in metadata.planner_data.values():
        target["class"] = None
    with raising_on_all(model):
        for prefix, master in masters:
            for slot in master.layout.slots:
                name = prefix + slot.name
                for key, dtype in states[name].elements.items() if name in states else ():
                    if (master, key) not in shards:
                        shards[master, key] = torch.zeros_like(master.flat.detach(), dtype=dtype)
                    target["state"][name][key] = sharded_slot(master, slot, shards[master, key], owners)
    # The planner's default drops tensors of which this rank has nothing, and then expects an older format.
    _read(opened, {"optimizer": target}, flatten_sharded_tensors=False)
    loaded = {
        name: SlotState(0, state.elements, {key: target["state"][name][key] for key in state.values})
        for name, state in states.items()
    }
    numbers = sorted(target["param_groups"], key=int)
    return _Kept(loaded, shards, [target["param_groups"][number] for number in numbers], target.get("class"))


def _fill_optimizer(kept: _Kept, model: Model, optimizer: torch.optim.Optimizer) -> None:
    """Loads into the optimizer what was read.  Collective over all ranks.

    Raises:
        ValueError: on every rank, if names or parameter groups do not fit on one of them.
    """
    # The ranks of a stage raise together; other stages learn of it here.
    with raising_on_all(model):
        fitted = loadable_state(
            trained_masters(model, optimizer),
            optimizer,
            kept.states,
            kept.groups,
            lambda _, master, key, __: kept.shards[master, key],
        )
    with raising_on_all(model):
        optimizer.load_state_dict(fitted)


def _saved_states(metadata: Metadata) -> dict[str, SlotState]:
    """The states that the checkpoint has for each parameter; their values are still to be read."""
    states: dict[str, SlotState] = {}
    for flat_key, about in metadata.state_dict_metadata.items():
        path = metadata.planner_data[flat_key]
        if path[:2] != ("optimizer", "state"):
            continue
        _, _, name, key = path
        state = states.setdefault(name, SlotState(0, {}, {}))
        if isinstance(about, TensorStorageMetadata) and len(about.size) > 0:
            state.elements[key] = about.properties.dtype
        else:
            state.values[key] = about
    return states


def _place(about: Any) -> Tensor | None:
    """Placeholder for `dcp.load`: it fills a tensor in place, and replaces anything else."""
    return (
        torch.zeros(about.size, dtype=about.properties.dtype, device="cpu")
        if isinstance(about, TensorStorageMetadata)
        else None
    )


def _saved_groups(metadata: Metadata) -> dict[str, dict[str, Any]]:
    """The checkpoint's parameter groups by number, with values still to be read.

    Raises:
        ValueError: if there are none.
    """
    groups: dict[str, dict[str, Any]] = {}
    planner_data: Mapping[str, Any] = metadata.planner_data or {}
    for flat_key, path in planner_data.items():
        if path[:2] == ("optimizer", "param_groups"):
            _, _, number, option = path
            about = metadata.state_dict_metadata[flat_key]
            groups.setdefault(number, {})[option] = _place(about)
    if not groups:
        raise ValueError("the checkpoint has no optimizer state; save it with save(path, model, optimizer)")
    return groups
