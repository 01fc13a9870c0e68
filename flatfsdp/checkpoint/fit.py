"""Checks that a checkpoint fits the model and the optimizer, before anything is read or changed.

In:   an open checkpoint, and a model or the stages of one.
Out:  nothing, or one ValueError on all ranks that names the differences and the option that allows them.
Next: `loading.py` reads what fits.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from flatfsdp.checkpoint.errors import CheckpointError
from flatfsdp.checkpoint.local import persistent_buffers
from flatfsdp.checkpoint.opening import OpenCheckpoint
from flatfsdp.checkpoint.stages import of_each_stage
from flatfsdp.comm.lanes import Lanes
from flatfsdp.contract.late_buffers import LATE_BUFFERS
from flatfsdp.engine.storage.master import MasterShard
from flatfsdp.engine.whole.units import Model, keys_of_slots, named_groups, stages_of
from flatfsdp.flat.sites import prefixed_modules

Accepted = Literal["dtype", "surplus", "optimizer", "lanes"]
"""Differences that `load` may accept: "dtype" converts values of another dtype; "surplus" leaves out entries
that the model has no place for; "optimizer" takes the state of an optimizer of another class; "lanes" goes on
with other lanes, and so with other bits."""

_SHOWN = 3
"""Largest number of names in one message."""


def check_accepted(accept: Collection[str]) -> None:
    """Checks `accept`; a misspelt value would accept nothing.

    Raises:
        ValueError: if `accept` is a string, or has values that `Accepted` does not list.
    """
    unknown = [accept] if isinstance(accept, str) else sorted(set(accept) - set(get_args(Accepted)))
    if unknown:
        raise ValueError(
            f"accept is a collection of {', '.join(map(repr, get_args(Accepted)))}; it has {unknown[0]!r}"
        )


class Entry(NamedTuple):
    """What a checkpoint has to have of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def entries_of(masters: Sequence[tuple[str, MasterShard]], shards: Sequence[Tensor]) -> dict[str, Entry]:
    """Entries of the parameters of master shards, with the dtypes of `shards`, one a master shard."""
    return {
        # A checkpoint cuts along dimensions, so there must be one.
        prefix + slot.name: Entry(slot.whole_shape or (1,), shard.dtype)
        for (prefix, master), shard in zip(masters, shards, strict=True)
        for slot in master.layout.slots
    }


def differences(saved: Mapping[str, Any], own: Mapping[str, Entry]) -> tuple[list[str], list[str], list[str]]:
    """The names of `own` that are missing in `saved`, of another shape, and of another dtype."""
    missing, shapes, dtypes = [name for name in own if name not in saved], [], []
    for name, (shape, dtype) in own.items():
        about = saved.get(name)
        if about is None:
            continue
        if not isinstance(about, TensorStorageMetadata):
            shapes.append(f"{name} (no tensor, here {shape})")
        elif tuple(about.size) != shape:
            shapes.append(f"{name} ({tuple(about.size)}, here {shape})")
        elif about.properties.dtype != dtype:
            dtypes.append(f"{name} ({about.properties.dtype}, here {dtype})")
    return missing, shapes, dtypes


def require_no_problems(what: str, problems: Mapping[str, list[str]]) -> None:
    """Raises ValueError, with a sentence for each problem that some names have."""
    told = []
    for problem, names in problems.items():
        if names:
            more = f", and {len(names) - _SHOWN} more," if len(names) > _SHOWN else ""
            told.append(f"{', '.join(names[:_SHOWN])}{more} {'is' if len(names) == 1 else 'are'} {problem}")
    if told:
        raise ValueError(f"{what}: {'. '.join(told)}")


def saved_in(opened: OpenCheckpoint) -> dict[str, Any]:
    """What the checkpoint has of the model, by the names in it, without extra state of modules."""
    entries = {".".join(map(str, path)): about for path, about in opened.entries("model").items()}
    return {name: about for name, about in entries.items() if not name.endswith("_extra_state")}


def check_model_fits(opened: OpenCheckpoint, model: Model, accept: Collection[str]) -> None:
    """Compares names, shapes and dtypes.  Collective over all ranks.

    Raises:
        ValueError: on every rank, naming tensors that are missing or of another shape, or, unless accepted,
            of another dtype or of no stage.
    """
    saved, entries, late = saved_in(opened), _entries(model), _late_names(model)
    # A layer does not need its late buffers before its first use.
    own = {name: entry for name, entry in entries.items() if name not in late}
    tied = (name for stage in stages_of(model) for names in keys_of_slots(stage).values() for name in names)
    of_stages = of_each_stage((*differences(saved, own), [*entries, *late, *tied]), model)
    missing, shapes, dtypes, names = (
        list(dict.fromkeys(chain.from_iterable(lists))) for lists in zip(*of_stages, strict=True)
    )
    surplus = sorted(saved.keys() - set(names))
    problems = {"missing in the checkpoint": missing, "of another shape": shapes}
    if "dtype" not in accept:
        problems["of another dtype; accept=('dtype',) converts them"] = dtypes
    if "surplus" not in accept:
        problems["only in the checkpoint; accept=('surplus',) leaves them out"] = surplus
    require_no_problems("the checkpoint is not of this model", problems)


def check_lanes_fit(saved: Mapping[str, int], own: Lanes | None, accept: Collection[str]) -> None:
    """Compares the lanes of a checkpoint, which are empty if it has none, with those of the model.

    A model without lanes does not promise the bits of a run that was never interrupted, and a checkpoint
    without lanes has none of them to keep.

    Raises:
        CheckpointError: if both have lanes, and these differ, unless that is accepted.
    """
    if saved and own is not None and "lanes" not in accept and Lanes(**saved) != own:
        raise CheckpointError(
            f"the checkpoint has {Lanes(**saved)}, and the model {own}: its gradients would be added in "
            "another order than before; build it with the lanes of the checkpoint, or begin new bits with "
            "accept=('lanes',)"
        )


def _entries(model: Model) -> dict[str, Entry]:
    """Entries of `sharded_state_dict`."""
    masters = [(prefix, group.master) for prefix, group in named_groups(model)]
    parameters = entries_of(masters, [master.flat for _, master in masters])
    buffers = {
        name: Entry(tuple(buffer.shape), buffer.dtype)
        for stage in stages_of(model)
        for name, buffer in persistent_buffers(stage)
    }
    return {**parameters, **buffers}


def _late_names(model: Model) -> set[str]:
    modules = (named for stage in stages_of(model) for named in prefixed_modules(stage))
    return {prefix + name for prefix, owner in modules for name in LATE_BUFFERS.of(owner)}
