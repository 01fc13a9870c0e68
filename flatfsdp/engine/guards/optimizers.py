"""Refuses optimizers that cannot train a sharded model, and states of other ranks; on all ranks alike.

In:   an optimizer that is given parameters or a state dict, or that is about to step.
Out:  ValueError before anything has changed, which says what to do instead.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flatfsdp.comm.meeting import meet
from flatfsdp.comm.objects import all_gather_object
from flatfsdp.contract.claimed import TAKEN_AS
from flatfsdp.contract.flat_shard import FLAT_SHARD
from flatfsdp.contract.main_grad import MAIN_GRAD
from flatfsdp.contract.whole_shape import WHOLE_SHAPE
from flatfsdp.engine.storage.optimizer_targets import ShardTarget
from flatfsdp.torch_private import never_traced

_NOT_ELEMENTWISE = (
    "adafactor adalomo adammini came dadaptadam dadaptsgd distributedshampoo fusedlamb fusednovograd "
    "galoreadafactor galoreadamw kfac lamb lars lbfgs muon novograd prodigy shampoo soap stableadamw"
)
"""Optimizers whose update of an element depends on other elements: class names, lower case, without "_"."""


PART = "flatfsdp_part"
"""Key of a state dict for the part of the model that its state is of: the value of `_parts`.

None if `flatfsdp.checkpoint` has made the state dict for this rank.
"""


_WATCHED = "_flatfsdp_watched"
"""Attribute of optimizers whose state dicts are watched."""


# Compiled optimizer steps call it, too, and the compiler cannot trace such a look at parameters.
@never_traced
def before_step(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Checks an optimizer that is about to step; a hook of all optimizers."""
    refuse_taken(optimizer)
    refuse_decay_by_dim(optimizer)
    # It may have got shards past add_param_group, by an assignment to its groups.
    watch(optimizer)
    # A closure runs the backward, later; the optimizer itself is the first argument.
    if not any(map(callable, (*args[1:], *kwargs.values()))):
        refuse_early_step(optimizer)


def watching(add: Callable[..., None]) -> Callable[..., None]:
    """An `add_param_group` that refuses what `watch` refuses, and leaves the optimizer without it."""

    @functools.wraps(add)
    def add_param_group(optimizer: torch.optim.Optimizer, param_group: dict[str, Any]) -> None:
        add(optimizer, param_group)
        try:
            watch(optimizer)
        except ValueError:
            # A caller that goes on has the optimizer as it was.
            optimizer.param_groups.pop()
            raise

    return add_param_group


def watch(optimizer: torch.optim.Optimizer) -> None:
    """Watches the state dicts of an optimizer that has shards, however it came by them.

    Raises:
        ValueError: if its update of an element depends on other elements.
    """
    # An ordinary optimizer, which is never watched, comes here in each step.
    if _WATCHED in vars(optimizer) or not _targets(optimizer):
        return
    names = {base.__name__.lower().replace("_", "") for base in type(optimizer).__mro__}
    if not names.isdisjoint(_NOT_ELEMENTWISE.split()):
        raise ValueError(
            f"{type(optimizer).__name__} needs whole parameters, and has this rank's part of each: its step "
            "would depend on the number of ranks. Use an element-wise one, such as flatfsdp.optim.AdamW"
        )
    optimizer.register_state_dict_post_hook(note_part)
    optimizer.register_load_state_dict_pre_hook(refuse_state_of_another_part)
    vars(optimizer)[_WATCHED] = True


def note_part(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """Notes in a state dict which ranks' part of the model it is of; a hook of the optimizer."""
    state_dict[PART] = _parts(optimizer)


def refuse_state_of_another_part(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """Checks a state dict before it is loaded; a hook of the optimizer.

    Collective over the ranks that share the model, unless `flatfsdp.checkpoint` has made the state dict.

    Raises:
        ValueError: on all ranks, if the state is not of this rank's part of the model on one of them.
        RuntimeError: if some ranks do not load.
    """
    if PART in state_dict and state_dict[PART] is None:
        return
    problem = _misfit(optimizer, state_dict)
    targets = {(target.grid, target.stages): target for target in _targets(optimizer)}
    for (grid, stages), target in targets.items():
        # One dimension after the other, with what is known so far: a problem of any rank reaches them all.
        for ranks in (*grid.dimensions, stages):
            meet(ranks, "optimizer.load_state_dict", target.group.unit.policy.timeout)
            problem = next(filter(None, all_gather_object(problem, ranks, target.device)), None)
    if problem is not None:
        raise ValueError(problem)


def _misfit(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> str | None:
    """Says why a state dict cannot be loaded; None if it can."""
    rank = f"rank {dist.get_rank()}" if dist.is_initialized() else "this rank"
    way_out = (
        "save with flatfsdp.checkpoint.save(path, model, optimizer), and load with flatfsdp.checkpoint.load; "
        "flatfsdp.checkpoint.load_full_optimizer_state_dict takes a state of whole parameters, by name"
    )
    if PART in state_dict:
        if state_dict[PART] == _parts(optimizer):
            return None
        return (
            f"{rank} loads the state dict of an optimizer that has another rank's part of the model, or had "
            f"it on another number of ranks, such as the first rank's from torch.save; {way_out}"
        )
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    # PyTorch itself refuses other lengths.
    for number, parameter in zip(numbers, parameters_of(optimizer), strict=False):
        for key, value in state_dict["state"].get(number, {}).items():
            if isinstance(value, Tensor) and value.dim() > 0 and value.shape != parameter.shape:
                shape = tuple(value.shape)
                return (
                    f"the state dict of an optimizer has {key!r} of shape {shape} for a parameter of which "
                    f"{rank} has {parameter.numel()} elements: its model was not sharded; {way_out}"
                )
    return None


def _parts(optimizer: torch.optim.Optimizer) -> list[list[int]]:
    """Rank and number of ranks in each dimension that parts a model, for each of the optimizer's models."""
    split_over = ((t.grid.shard, t.grid.tensor, t.stages) for t in _targets(optimizer))
    return [[n for ranks in each for n in (ranks.rank, ranks.size)] for each in dict.fromkeys(split_over)]


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """All parameters of the optimizer."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _targets(optimizer: torch.optim.Optimizer) -> list[ShardTarget]:
    """Targets of the optimizer's shards; each step asks, so there is no function call a parameter."""
    shard = FLAT_SHARD.name
    found = (p.__dict__.get(shard) for group in optimizer.param_groups for p in group["params"])
    return [target for target in found if isinstance(target, ShardTarget)]


def refuse_taken(optimizer: torch.optim.Optimizer) -> None:
    """Checks what an optimizer has; runs before every step of every one, and reads one attribute a parameter.

    Raises:
        ValueError: if the optimizer has a parameter that a unit has taken, or shows in its place.
    """
    # No function call per parameter: that would take most of the time.
    mark = TAKEN_AS.name
    name = next((p.__dict__[mark] for p in parameters_of(optimizer) if mark in p.__dict__), None)
    if name is not None:
        raise ValueError(
            f"this {type(optimizer).__name__} has parameter {name} as it was before the model was sharded, "
            "as a forward reads it, or as summon_full_params shows it, and would not reach the shards. Build "
            "it after sharding, from model.parameters() outside of summon_full_params, or from param_groups"
        )


def refuse_early_step(optimizer: torch.optim.Optimizer) -> None:
    """Checks that all backwards have come before the step; runs before every step without a closure.

    Raises:
        RuntimeError: if gradients of the optimizer's parameters are accumulated and not yet reduced; if
            nothing in the optimizer has a gradient, and no backward has brought one to a model whose shards
            it has since that model's last training forward.
    """
    groups = list(dict.fromkeys(target.group for target in _targets(optimizer)))
    # First: this may find that accumulated gradients were zeroed, and drop them.
    for group in groups:
        group.require_reduced()
    if any(p.grad is not None or MAIN_GRAD.of(p) is not None for p in parameters_of(optimizer)):
        return
    if any(group.unit.shared.microbatch.awaits_gradients for group in groups):
        raise RuntimeError(
            f"this {type(optimizer).__name__} would change nothing: it has no gradient, and no backward has "
            "brought one to the model since its last training forward. No graph leads to what parameters() "
            "lists: leave inputs out of backward(inputs=...); without a backward there is no step() either"
        )


def refuse_decay_by_dim(optimizer: torch.optim.Optimizer) -> None:
    """Raises ValueError for groups chosen by `p.dim() >= 2`, which selects nothing among 1-D shards."""
    groups = optimizer.param_groups
    is_empty = any(not group["params"] and group.get("weight_decay") for group in groups)
    spared = (p for group in groups if not group.get("weight_decay") for p in group["params"])
    if is_empty and any(map(_has_matrix, spared)):
        raise ValueError(
            f"this {type(optimizer).__name__} decays nothing: its group with weight_decay is empty. Shards "
            "are 1-D, so p.dim() does not tell: flatfsdp.param_groups(model, [{'params': lambda name, shape: "
            "len(shape) < 2, 'weight_decay': 0.0}]) does; if nothing is to decay, leave out the empty group"
        )


def _has_matrix(parameter: Tensor) -> bool:
    """Whether an optimizer has, in this shard, a part of a parameter that has a matrix's shape as a whole."""
    shape, target = WHOLE_SHAPE.of(parameter), FLAT_SHARD.of(parameter)
    if shape is not None or not isinstance(target, ShardTarget):
        return shape is not None and len(shape) >= 2
    return any(len(slot.whole_shape) >= 2 for slot in target.group.layout.slots)
