"""Optimizer state in fairscale's numbered format, converted from the engine's, which goes by names.

    {"state": {number: {key: tensor of the parameter's shape, or a number, or [a tensor without dimensions]}},
     "param_groups": [{**options, "params": [all numbers]}],
          "param_id_map": {number of a parameter: number of its flat parameter, or None if that has no state},
          "uncollected_local_ids": [numbers of flat parameters whose state is the first rank's only]}

Parameters are numbered unit by unit, outer units first, frozen ones included; flat parameters in the order of
`model.parameters()`.  Neither depends on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from flatfsdp.checkpoint import full_optimizer_state_dict
from flatfsdp.checkpoint.full import described_whole
from flatfsdp.engine.guards.optimizers import PART
from flatfsdp.engine.storage.master import MasterShard
from flatfsdp.engine.whole.units import UnitModule, distinct_units, named_groups
from flatfsdp.flat.layout import ParamSlot
from flatfsdp.optim.joined import STEP


def gather_full(model: UnitModule, optimizer: Optimizer) -> dict[str, Any] | None:
    """The whole state on the first rank, on the CPU; None on the others.  Collective.

    Raises:
        AssertionError: if the optimizer has several parameter groups.
    """
    assert len(optimizer.param_groups) == 1, (
        "fairscale's format has one parameter group; for several, use "
        "flatfsdp.checkpoint.full_optimizer_state_dict"
    )
    by_name = full_optimizer_state_dict(model, optimizer, rank0_only=True, cpu_offload=True)
    if model.fsdp_state.grid.shard.rank != 0:
        return None
    groups = named_groups(model)
    described = described_whole(
        by_name["state"],
        {prefix + slot.name: slot.shape for prefix, group in groups for slot in group.layout.slots},
    )
    state: dict[int, dict[str, Any]] = {}
    param_id_map: dict[int, int | None] = {}
    for local_id, (prefix, group) in enumerate(groups):
        names = [prefix + slot.name for slot in group.layout.slots]
        has_state = any(name in described for name in names)
        for name in names:
            number = len(param_id_map)
            param_id_map[number] = local_id if has_state else None
            if name in described:
                numbers = {key: _outgoing(key, value) for key, value in described[name].values.items()}
                state[number] = {**by_name["state"][name], **numbers}
    options = {key: value for key, value in by_name["param_groups"][0].items() if key != "params"}
    extra = {key: value for key, value in optimizer.state_dict().items() if key not in (*by_name, PART)}
    return {
        **extra,
        "state": state,
        "param_groups": [{**options, "params": list(param_id_map)}],
        "param_id_map": param_id_map,
        "uncollected_local_ids": _uncollected(model),
    }


def _outgoing(key: str, value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    # The same on all ranks.
    return value.item() if key == STEP else [value]


def is_uncollected(unit: UnitModule, model: UnitModule) -> bool:
    """Whether each rank has this unit to itself, or its state was declared as not collected."""
    is_alone = unit.fsdp_state.grid.num_ranks == 1 < model.fsdp_state.grid.num_ranks
    return bool(getattr(unit, "no_broadcast_optim_state", False)) or is_alone


def _uncollected(model: UnitModule) -> list[int]:
    """Numbers of the flat parameters of uncollected units."""
    alone = [is_uncollected(unit, model) for unit in distinct_units(model) for _ in unit.fsdp_state.groups]
    return [local_id for local_id, is_alone in enumerate(alone) if is_alone]


def shard_of(model: UnitModule, full: dict[str, Any]) -> dict[str, Any]:
    """This rank's part of a whole state, for `optimizer.load_state_dict`.

    Raises:
        ValueError: if the state is not of this model, wrapped in the same units.
    """
    masters = [group.master for _, group in named_groups(model)]
    numbers = iter(range(sum(len(master.layout.slots) for master in masters)))
    numbered = [[(next(numbers), slot) for slot in master.layout.slots] for master in masters]
    _check_fits(numbered, full)
    state = {
        local_id: _flat_state(master, slots, full["state"], model.fsdp_state.grid.shard.rank)
        for local_id, (master, slots) in enumerate(zip(masters, numbered, strict=True))
        if any(number in full["state"] for number, _ in slots)
    }
    added = ("param_id_map", "uncollected_local_ids")
    return {
        **{key: value for key, value in full.items() if key not in added},
        "state": state,
        "param_groups": [{**group, "params": list(range(len(masters)))} for group in full["param_groups"]],
    }


def _check_fits(numbered: Sequence[Sequence[tuple[int, ParamSlot]]], full: dict[str, Any]) -> None:
    expected = [number for slots in numbered for number, _ in slots]
    saved = full["param_id_map"]
    if list(saved) != expected:
        raise ValueError(
            f"the optimizer state has {len(saved)} parameters and this model {len(expected)}; it fits only "
            "the same model"
        )
    for local_id, slots in enumerate(numbered):
        for number, slot in slots:
            if saved[number] not in (None, local_id):
                raise ValueError(
                    f"{slot.name} is in flat parameter {local_id} of this model, but was in {saved[number]} "
                    "when the optimizer state was saved; wrap the same modules"
                )
            for key, value in full["state"].get(number, {}).items():
                if isinstance(value, Tensor) and value.dim() > 0 and tuple(value.shape) != slot.shape:
                    raise ValueError(
                        f"{key!r} of parameter {number} has shape {tuple(value.shape)} in the optimizer "
                        f"state, but {slot.name} has {slot.shape}"
                    )


def _flat_state(
    master: MasterShard, slots: Sequence[tuple[int, ParamSlot]], state: dict[int, dict[str, Any]], rank: int
) -> dict[str, Any]:
    """The optimizer's state of one flat shard."""
    flat: dict[str, Any] = {}
    for number, _ in slots:
        for key, value in state.get(number, {}).items():
            if key in flat:
                continue
            # Fairscale puts single numbers in lists, so a 0-dim tensor is the state of a scalar parameter.
            if isinstance(value, Tensor) and key != STEP:
                wholes = {slot: state.get(number, {}).get(key) for number, slot in slots}
                flat[key] = master.cut(wholes.get, value.dtype)
            elif isinstance(value, list):
                flat[key] = value[rank] if rank < len(value) else value[0]
            else:
                flat[key] = value
    return flat
