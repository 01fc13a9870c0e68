"""Optimizers of `FlatAccelerator`: made before or after their models were sharded, and saved with them.

In:   optimizers with whole parameters, and the part of each parameter that this rank updates.
Out:  the same optimizers with the same groups and options, of the parts; which one belongs to which model.
"""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from flatfsdp.compat.training_loops import require_current
from flatfsdp.contract.flat_shard import FLAT_SHARD
from flatfsdp.engine.guards.optimizers import watch
from flatfsdp.engine.whole.units import named_groups


def hand_over(optimizer: Optimizer, parts: MutableMapping[Tensor, Any]) -> None:
    """Replaces whole parameters in an optimizer by this rank's parts.

    Args:
        optimizer: made at any time.
        parts: what replaced each parameter.

    Raises:
        ValueError: if it has state of whole parameters, or a parameter of a model that was sharded
            elsewhere; if it needs whole parameters.  The optimizer is unchanged then.
    """
    require_without_state(optimizer, parts)
    whole = [group["params"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["params"] = [parts.get(each, each) for each in group["params"]]
    try:
        require_current(optimizer, "make it after flatfsdp.shard, or leave sharding to prepare")
        watch(optimizer)
    except ValueError:
        for group, parameters in zip(optimizer.param_groups, whole, strict=True):
            group["params"] = parameters
        raise


def require_without_state(optimizer: Optimizer, parameters: Iterable[Tensor]) -> None:
    """Checks that an optimizer has no state yet for these parameters, which are to be sharded.

    Raises:
        ValueError: if it has.
    """
    # `get`, because the state may be a defaultdict, which must not grow.
    if any(optimizer.state.get(each) for each in parameters):
        raise ValueError(
            f"this {type(optimizer).__name__} has state of whole parameters; prepare it with its model, then "
            "load: accelerator.load_state, or checkpoint.load_full_optimizer_state_dict"
        )


def pairs(models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> list[tuple[Any, Optimizer | None]]:
    """Pairs each of these sharded models with its optimizer.

    Raises:
        ValueError: if a model has several optimizers, or an optimizer has parameters of several models, or of
            a sharded model that is not in `models`.
    """
    found: list[tuple[Any, Optimizer | None]] = []
    for model in models:
        own = _updated(model)
        of_model = [each for each in optimizers if not own.isdisjoint(_parameters(each))]
        if len(of_model) > 1:
            count, name = len(of_model), type(model).__name__
            raise ValueError(f"{count} optimizers update one {name}; make one with several parameter groups")
        if of_model and not own.issuperset(_parameters(of_model[0])):
            updates = f"an optimizer updates this {type(model).__name__} and other parameters"
            raise ValueError(f"{updates}; make an optimizer for each model, or one module of all")
        found.append((model, of_model[0] if of_model else None))
    known = {id(optimizer) for _, optimizer in found}
    for optimizer in optimizers:
        if id(optimizer) not in known and any(FLAT_SHARD.of(p) is not None for p in _parameters(optimizer)):
            name = type(optimizer).__name__
            raise ValueError(
                f"this {name} is of another sharded model; give accelerator.prepare the model, too"
            )
    return found


def _updated(model: nn.Module) -> set[nn.Parameter]:
    """Tensors of a sharded model that an optimizer may update: parameters, or cuts by `param_groups`."""
    masters = [group.master for _, group in named_groups(model)]
    return {parameter for master in masters for parameter in master.parameters} | {*model.parameters()}


def _parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
