"""Translates a torch optimizer's state of flat shards to original parameters, and back.

In:   an optimizer over the local shards of a model's master shards.
Out:  `described`: for each parameter, its group and its states; `state_shard`: one state of one flat group,
      as long as the master shard; `loadable_state`: the reverse.
Next: `full.py` joins the shards to whole tensors, `sharded.py` leaves them apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flatfsdp.comm.objects import all_gather_object
from flatfsdp.engine.guards.optimizers import PART
from flatfsdp.engine.storage.master import LocalShard, MasterShard
from flatfsdp.engine.storage.shard_grad import plain
from flatfsdp.engine.whole.units import Model, named_groups
from flatfsdp.flat.layout import Piece
from flatfsdp.optim.fused import FusedOptimizer


@dataclass(frozen=True)
class SlotState:
    """Optimizer state of one parameter.

    Attributes:
        group: index of its parameter group.
        elements: dtype of each state that has the parameter's shape.
        values: each state that is one number for the whole parameter, such as "step".
    """

    group: int
    elements: dict[str, torch.dtype]
    values: dict[str, Any]


def trained_masters(model: Model, optimizer: torch.optim.Optimizer) -> list[tuple[str, MasterShard]]:
    """Master shards of trained flat groups, each with the prefix of its names.

    Includes groups that are frozen for now, if the optimizer has them: it may keep state for them.
    """
    listed = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    return [
        (prefix, group.master)
        for prefix, group in named_groups(model)
        if group.trains or (group.main_grad is not None and not listed.isdisjoint(group.master.parameters))
    ]


@dataclass(frozen=True)
class Described:
    """Description of an optimizer over all ranks.

    Attributes:
        states: state by parameter name.
        local_shards: names of the parameters in each local shard of each rank.
    """

    states: dict[str, SlotState]
    local_shards: list[list[str]]


def described(masters: Sequence[tuple[str, MasterShard]], optimizer: torch.optim.Optimizer) -> Described:
    """Describes the optimizer's state, including parameters that other ranks hold.  Collective.

    Raises:
        ValueError: if the optimizer is not over this model's shards.
        TypeError: if a state is neither one number nor as large as its parameter.
        NonFiniteGradientError: if the optimizer has refused its last step.
        All of them are raised on every rank.
    """
    if isinstance(optimizer, FusedOptimizer):
        optimizer.raise_if_nonfinite()
    group_of = {p: index for index, group in enumerate(optimizer.param_groups) for p in group["params"]}
    owned = {local_shard.parameter for _, master in masters for local_shard in master.local_shards}
    problem: Exception | None = None
    state_of: dict[nn.Parameter, SlotState] = {}
    try:
        # `model.parameters()` lists frozen parameters, too, for which an optimizer has no state.
        if {p for p in group_of if p.requires_grad or p in owned} != owned:
            raise ValueError(
                "the optimizer's parameters are not the shards of this model; once it is sharded, build it "
                "from model.parameters(), or flatfsdp.param_groups(model, ...), with parts without elements"
            )
        state_of = {parameter: _slot_state(optimizer, parameter, group_of[parameter]) for parameter in owned}
    except (ValueError, TypeError) as error:
        problem = error
    states: dict[str, SlotState] = {}
    local_shards: list[list[str]] = []
    for prefix, master in masters:
        own = [
            {
                # Each name has tensors of its own: who loads the state counts steps in them.
                prefix + piece.slot.name: deepcopy(state_of[local_shard.parameter])
                for piece in pieces
            }
            for local_shard, pieces in (with_pieces(master) if problem is None else ())
        ]
        for their_problem, theirs in all_gather_object((problem, own), master.grid.shard, master.device):
            if their_problem is not None:
                raise their_problem
            for of_local_shard in theirs:
                local_shards.append(list(of_local_shard))
                for name, state in of_local_shard.items():
                    states.setdefault(name, state)
    return Described(states, local_shards)


def _slot_state(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, group: int) -> SlotState:
    """The state of a local shard; raises TypeError if it cannot be saved."""
    state = SlotState(group, {}, {})
    for key, value in optimizer.state.get(parameter, {}).items():
        is_tensor = isinstance(value, Tensor)
        if is_tensor and value.shape == parameter.shape:
            state.elements[key] = value.dtype
        elif is_tensor and value.numel() == 1:
            # A copy, because the optimizer goes on counting in its own tensor.
            state.values[key] = value.detach().to("cpu", copy=True)
        elif value is None or isinstance(value, (int, float, bool)):
            state.values[key] = value
        else:
            kind = f"of shape {tuple(value.shape)}" if is_tensor else type(value).__name__
            raise TypeError(
                f"{type(optimizer).__name__} keeps {key!r} ({kind}) for a flat shard of {parameter.numel()} "
                "elements; only states of one number or one an element can be saved"
            )
    return state


def element_dtypes(prefix: str, master: MasterShard, states: dict[str, SlotState]) -> dict[str, torch.dtype]:
    """Dtypes of one flat group's states with as many elements as their parameters, in order of the keys."""
    found: dict[str, torch.dtype] = {}
    for slot in master.layout.slots:
        if prefix + slot.name in states:
            found.update(states[prefix + slot.name].elements)
    return {key: found[key] for key in sorted(found)}


def state_shard(
    master: MasterShard, optimizer: torch.optim.Optimizer, key: str, dtype: torch.dtype
) -> Tensor:
    """State `key` of one flat group: 1-D, as long as the master shard, zero where there is none.

    Returns the optimizer's own tensor, not a copy, if that covers the whole shard.
    """
    for local_shard in master.local_shards:
        value = optimizer.state.get(local_shard.parameter, {}).get(key)
        if value is not None and _is_all(local_shard, master):
            return plain(value)
    shard = torch.zeros_like(master.flat.detach(), dtype=dtype)
    for parameter, start, stop in master.local_shards:
        value = optimizer.state.get(parameter, {}).get(key)
        if value is not None:
            shard[start:stop] = value
    return shard


def state_of_local_shard(
    local_shard: LocalShard, optimizer: torch.optim.Optimizer, key: str, dtype: torch.dtype
) -> Tensor:
    """State `key` of a local shard, 1-D: the optimizer's own tensor, not a copy, or zeros."""
    value = optimizer.state.get(local_shard.parameter, {}).get(key)
    return torch.zeros_like(local_shard.parameter.detach(), dtype=dtype) if value is None else plain(value)


def _is_all(local_shard: LocalShard, master: MasterShard) -> bool:
    return local_shard.stop - local_shard.start == master.flat.numel()


def groups_by_name(optimizer: torch.optim.Optimizer, states: dict[str, SlotState]) -> list[dict[str, Any]]:
    """The optimizer's parameter groups, with names in place of parameters."""
    return [
        {**group, "params": [name for name, state in states.items() if state.group == index]}
        for index, group in enumerate(optimizer.param_groups)
    ]


def merged_groups(of_stages: Iterable[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The parameter groups of all stages of a pipeline: those with the same options become one.

    Args:
        of_stages: each stage's parameter groups, from `groups_by_name`.
    """
    merged: list[dict[str, Any]] = []
    for groups in of_stages:
        taken: set[int] = set()
        for index, group in enumerate(groups):
            # Try the group with the same number first: a stage may have several with the same options.
            candidates = sorted(set(range(len(merged))) - taken, key=lambda number: number != index)
            number = next((n for n in candidates if _same_options(merged[n], group)), len(merged))
            if number == len(merged):
                merged.append({**group, "params": []})
            merged[number]["params"] += group["params"]
            taken.add(number)
    return merged


def _same_options(ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
    options = ours.keys() - {"params"}
    return ours.keys() == theirs.keys() and all(bool(ours[each] == theirs[each]) for each in options)


def loadable_state(
    masters: Sequence[tuple[str, MasterShard]],
    optimizer: torch.optim.Optimizer,
    states: dict[str, SlotState],
    param_groups: Sequence[dict[str, Any]],
    shard_of: Callable[[str, MasterShard, str, torch.dtype], Tensor],
) -> dict[str, Any]:
    """Makes the argument for the optimizer's own `load_state_dict`.  Collective, like `described`.

    A group of parameters that were not trained when the state was saved keeps its options and has no state.

    Args:
        masters: master shards with their prefixes, from `trained_masters`.
        optimizer: optimizer to load into.
        states: saved states by parameter name; their group numbers are not used.
        param_groups: saved parameter groups, from `groups_by_name`.
        shard_of: function of (prefix, master, key, dtype) that returns a state's shard; called on all ranks
            in the same order.

    Raises:
        ValueError: if names or parameter groups do not fit.
    """
    current = described(masters, optimizer)
    options = [
        _options_for(index, group, param_groups)
        for index, group in enumerate(groups_by_name(optimizer, current.states))
    ]
    _check_fit(masters, current.local_shards, states)
    numbers = {
        parameter: number
        for number, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"])
    }
    state: dict[int, dict[str, Any]] = {}
    for prefix, master in masters:
        dtypes = element_dtypes(prefix, master, states)
        shards = {key: shard_of(prefix, master, key, dtype) for key, dtype in dtypes.items()}
        for local_shard, pieces in with_pieces(master):
            names = [prefix + piece.slot.name for piece in pieces]
            if not names and _is_all(local_shard, master):
                # A shard of padding alone counts steps, too.
                names = [prefix + slot.name for slot in master.layout.slots]
            own = states.get(names[0]) if names else None
            state[numbers[local_shard.parameter]] = _local_shard_state(master, local_shard, own, shards)
    groups = [
        {**saved, "params": [numbers[p] for p in group["params"]]}
        for saved, group in zip(options, optimizer.param_groups, strict=True)
    ]
    return {"state": {n: s for n, s in state.items() if s}, "param_groups": groups, PART: None}


def _options_for(index: int, own: dict[str, Any], saved: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Finds the saved group that has the parameters of `own`; by its number, if `own` has none.

    Returns `own` itself if no saved group has any of them.
    """
    names = set(own["params"])
    for number, group in enumerate(saved):
        if names <= set(group["params"]) and (names or number == index):
            return group
    if names and not any(names.intersection(group["params"]) for group in saved):
        return own
    raise ValueError(
        f"no saved parameter group contains all of this optimizer's group {index} "
        f"({', '.join(own['params'][:3])}, ...); "
        "cut groups as they were saved, and parameters that were frozen then into groups of their own"
    )


def _check_fit(
    masters: Sequence[tuple[str, MasterShard]],
    local_shards: Sequence[Sequence[str]],
    states: dict[str, SlotState],
) -> None:
    """Raises ValueError, on every rank alike, unless each local shard of each rank can have one state."""
    names = {prefix + slot.name for prefix, master in masters for slot in master.layout.slots}
    unknown = sorted(set(states) - names)
    if unknown:
        raise ValueError(not_trained(unknown[0]))
    for local_shard in local_shards:
        found = [states.get(name) for name in local_shard]
        for name, state in zip(local_shard, found, strict=True):
            if not _alike(found[0], state):
                raise ValueError(
                    f"the optimizer state of {name} differs from {local_shard[0]}'s, or one of them is "
                    "missing, but both are in one parameter here; separate them with param_groups"
                )


def not_trained(name: str) -> str:
    """Says what is wrong with the state of a parameter of this name."""
    return (
        f"the optimizer state has {name!r}, which is not a trained parameter here: load it into the model "
        "that it was saved from, with the same parameters frozen"
    )


def _alike(ours: SlotState | None, theirs: SlotState | None) -> bool:
    if ours is None or theirs is None:
        return ours is theirs
    if ours.elements.keys() != theirs.elements.keys() or ours.values.keys() != theirs.values.keys():
        return False
    return all(bool(ours.values[key] == theirs.values[key]) for key in ours.values)


def _local_shard_state(
    master: MasterShard, local_shard: LocalShard, state: SlotState | None, shards: dict[str, Tensor]
) -> dict[str, Any]:
    if state is None:
        return {}
    whole = _is_all(local_shard, master)
    # Copies: the optimizer keeps the tensors, and the state may be used again.
    values = {key: v.clone() if isinstance(v, Tensor) else v for key, v in state.values.items()}
    elements = {
        key: shards[key] if whole else shards[key][local_shard.start : local_shard.stop].clone()
        for key in state.elements
    }
    return {**values, **elements}


def with_pieces(master: MasterShard) -> Iterator[tuple[LocalShard, list[Piece]]]:
    """Yields the local shards of this rank, each with the pieces of parameters that it holds."""
    layout, ranks = master.layout, master.grid.shard
    if not master.is_divided:
        yield master.local_shards[0], layout.pieces(ranks.rank, ranks.size)
        return
    # One a slot: a search among all pieces for each would be a square of their number.
    for local_shard, slot in zip(master.local_shards, layout.slots, strict=True):
        piece = layout.piece(slot, ranks.rank, ranks.size)
        yield local_shard, [] if piece is None else [piece]
