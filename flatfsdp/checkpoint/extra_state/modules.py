"""Stores the extra state of all modules of a model in a sharded checkpoint.

In:   a model, or the stages of a pipeline that this rank has.
Out:  tensors by module, which `saving.py` writes; places for them, which `loading.py` fills.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Collection, Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from flatfsdp.checkpoint.extra_state import transformer_engine
from flatfsdp.checkpoint.extra_state.packed import JSON, pack, unpack
from flatfsdp.checkpoint.opening import OpenCheckpoint
from flatfsdp.checkpoint.reader import place_for
from flatfsdp.checkpoint.stages import of_each_stage, raising_on_all, world_of
from flatfsdp.comm.objects import all_gather_object
from flatfsdp.contract.transparent import prefixed_modules
from flatfsdp.engine.whole.units import Model, stages_of

_logger = logging.getLogger(__name__)

SECTION = "modules"
"""Key of all extra state in a checkpoint, beside "model" and "optimizer"."""

Packed = dict[str, Tensor]
"""One module's extra state; see `pack`."""


def packed_states(model: Model) -> dict[str, Packed]:
    """Extra state to save, by the names of modules.  Collective over all ranks.

    Each module's state is returned on the first of the ranks that have the module.  If another rank has
    different values, these are lost, and a warning names the module.

    Raises:
        TypeError: on every rank, naming the module, if its state has more than tensors and plain values.
    """
    with raising_on_all(model):
        own = {name: _packed(name, module) for name, module in _owners(model)}
    world, device = world_of(model)
    digests = all_gather_object({name: _digest(packed) for name, packed in own.items()}, world, device)
    mine = {}
    for name, packed in own.items():
        holders = [rank for rank, of_rank in enumerate(digests) if name in of_rank]
        if holders[0] != world.rank:
            continue
        mine[name] = packed
        others = [rank for rank in holders if digests[rank][name] != digests[world.rank][name]]
        if others:
            _logger.warning(
                "%s: the extra state of rank %d is saved, and that of rank %d is another one: a run that "
                "resumes has other bits. Scales of FP8 are equal where amaxes are reduced over all ranks "
                "(reduce_amax=True, amax_reduction_group)",
                name,
                world.rank,
                others[0],
            )
    return mine


def check_fits(opened: OpenCheckpoint, model: Model, accept: Collection[str]) -> None:
    """Compares the names of modules.  Collective over all ranks.

    A module whose state was not saved keeps its own, as it does before a first step.

    Raises:
        ValueError: on every rank, if the checkpoint has the state of a module that no stage has, unless
            "surplus" is accepted.
    """
    own = set().union(*of_each_stage({name for name, _ in _owners(model)}, model))
    surplus = sorted(places(opened).keys() - own)
    if surplus and "surplus" not in accept:
        raise ValueError(
            f"the checkpoint has extra state of the module {surplus[0]!r}, and the model has no such module "
            "with one; accept=('surplus',) leaves it out"
        )


def places(opened: OpenCheckpoint) -> dict[str, Packed]:
    """Allocates tensors for all extra state in the checkpoint, on all ranks alike; they are small."""
    found: dict[str, Packed] = {}
    for path, about in opened.entries(SECTION).items():
        place = place_for(about)
        if len(path) == 2 and place is not None:
            found.setdefault(path[0], {})[path[1]] = place
    return {name: tensors for name, tensors in found.items() if JSON in tensors}


def unpacked(model: Model, read: Mapping[str, Packed]) -> dict[str, Any]:
    """Converts what was read to the values that this rank's modules take; changes nothing.

    Raises:
        ValueError: naming the module, if a value is not what a save writes.
    """
    values = {}
    for name, module in _owners(model):
        if name in read:
            seals = transformer_engine.seals(module)
            try:
                value = unpack(read[name], transformer_engine.make if seals else None)
            except ValueError as error:
                raise ValueError(f"the checkpoint's extra state of the module {name!r} has {error}") from None
            values[name] = transformer_engine.sealed(value) if seals else value
    return values


def give(model: Model, values: Mapping[str, Any]) -> None:
    """Gives this rank's modules what `unpacked` returns."""
    for name, module in _owners(model):
        if name in values:
            with transformer_engine.unpickling() if transformer_engine.seals(module) else nullcontext():
                module.set_extra_state(values[name])


def _owners(model: Model) -> Iterator[tuple[str, nn.Module]]:
    """Modules with extra state, by name; the first one of a module with several."""
    seen: set[nn.Module] = set()
    for stage in stages_of(model):
        for prefix, module in prefixed_modules(stage):
            has_state = type(module).get_extra_state is not nn.Module.get_extra_state
            if has_state and module not in seen:
                seen.add(module)
                yield prefix.removesuffix("."), module


def _packed(name: str, module: nn.Module) -> Packed:
    value = module.get_extra_state()
    try:
        if transformer_engine.seals(module):
            return pack(transformer_engine.opened(value), transformer_engine.take_apart)
        return pack(value)
    except TypeError as error:
        raise TypeError(
            f"the extra state of the module {name!r} ({type(module).__name__}) has {error}, and a checkpoint "
            "holds tensors, numbers, strings, lists, tuples and dicts: reading more could run code"
        ) from None


def _digest(packed: Packed) -> str:
    found = hashlib.sha256()
    for key, tensor in packed.items():
        found.update(f"{key} {tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
