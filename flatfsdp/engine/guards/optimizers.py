"""Refuses optimizers that cannot train a sharded model: in their first step, on all ranks alike.

In:   an optimizer that is about to step.
Out:  ValueError before the step begins, which says what to do instead.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flatfsdp.contract.claimed import TAKEN_AS
from flatfsdp.contract.flat_shard import FLAT_SHARD
from flatfsdp.contract.main_grad import MAIN_GRAD
from flatfsdp.engine.param_groups import PortionTarget, uncut_shapes

_NOT_ELEMENTWISE = frozenset(
    {
        "adafactor",
        "adalomo",
        "adammini",
        "came",
        "dadaptadam",
        "dadaptsgd",
        "distributedshampoo",
        "fusedlamb",
        "fusednovograd",
        "galoreadafactor",
        "galoreadamw",
        "kfac",
        "lamb",
        "lars",
        "lbfgs",
        "muon",
        "novograd",
        "prodigy",
        "shampoo",
        "soap",
        "stableadamw",
    }
)
"""Optimizers whose update of an element depends on other elements: class names, lower case, without "_"."""


def refuse_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Checks an optimizer; runs before every step of every optimizer, so it reads one attribute a parameter.

    Raises:
        ValueError: if the optimizer has a parameter that a unit has taken, or shows in its place; if it needs
            whole parameters and has shards; if weight decay was chosen by `p.dim()`, which is 1 for shards.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    # No function call per parameter: that would take most of the time.
    mark = TAKEN_AS.name
    name = next((p.__dict__[mark] for p in parameters if mark in p.__dict__), None)
    if name is not None:
        raise ValueError(
            f"this {type(optimizer).__name__} has parameter {name} as it was before the model was "
            "sharded, as a forward reads it, or as summon_full_params shows it; its step would not reach the "
            "shards. Build the optimizer after sharding, outside of summon_full_params, from "
            "model.parameters() or flatfsdp.param_groups(model, ...)"
        )
    if not _is_elementwise(type(optimizer)) and any(FLAT_SHARD.of(p) is not None for p in parameters):
        raise ValueError(
            f"{type(optimizer).__name__} needs whole parameters, or all of them together, and has this "
            "rank's part of each: its step would depend on the number of ranks. Use an element-wise "
            "optimizer (SGD, Adam, AdamW, ...), such as flatfsdp.optim.AdamW"
        )
    _refuse_decay_by_dim(optimizer)


def refuse_early_step(optimizer: torch.optim.Optimizer) -> None:
    """Checks that all backwards have come before the step; runs before every step without a closure.

    Raises:
        RuntimeError: if gradients of the optimizer's parameters are accumulated and not yet reduced; if
            nothing in the optimizer has a gradient, and no backward has brought one to a model whose shards
            it has since that model's last training forward.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    # No function call per parameter, as above.
    shard = FLAT_SHARD.name
    targets = [t for p in parameters if isinstance(t := p.__dict__.get(shard), PortionTarget)]
    for group in dict.fromkeys(target.group for target in targets):
        group.require_reduced()
    if any(p.grad is not None or MAIN_GRAD.of(p) is not None for p in parameters):
        return
    if any(target.awaits_gradients for target in targets):
        raise RuntimeError(
            f"this {type(optimizer).__name__} would change nothing: it has no gradient, and no backward has "
            "brought one to the model since its last training forward. backward(inputs=...) with what "
            "parameters() lists computes nothing, as the graph leads to gathered parameters: leave inputs "
            "out. A batch that is meant to have no backward needs no step() either"
        )


def _refuse_decay_by_dim(optimizer: torch.optim.Optimizer) -> None:
    """Refuses groups chosen by `p.dim() >= 2`, which selects nothing among 1-D shards."""
    groups = optimizer.param_groups
    if not any(not group["params"] and group.get("weight_decay") for group in groups):
        return
    spared = (p for group in groups if not group.get("weight_decay") for p in group["params"])
    if any(_has_matrix(parameter) for parameter in spared):
        raise ValueError(
            f"this {type(optimizer).__name__} decays nothing: its group with weight_decay is empty, and "
            "matrices are in one without. Shards are 1-D, so p.dim() does not tell; make the groups with "
            'flatfsdp.param_groups(model, [{"params": lambda name, shape: len(shape) < 2, '
            '"weight_decay": 0.0}]); if nothing is to be decayed, leave out the empty group'
        )


def _has_matrix(parameter: Tensor) -> bool:
    return any(len(shape) >= 2 for shape in uncut_shapes(parameter))


def _is_elementwise(cls: type) -> bool:
    names = {base.__name__.lower().replace("_", "") for base in cls.__mro__}
    return not names & _NOT_ELEMENTWISE
