"""Evidence of two runs: compares every loss, gradient, parameter and optimizer state bit for bit.

In:   a run's `Trained` and the reduced gradients that a `GradientRecorder` kept.
Out:  for each kind of evidence the first place on each rank where two runs differ, or nothing.
Next: `verify.py` makes a row of a report of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from flatfsdp.comm.launch import Rank
from flatfsdp.contract.transparent import prefixed_modules
from flatfsdp.engine.storage.master import MasterShard
from flatfsdp.engine.whole.units import named_groups
from flatfsdp.parity.loop import Trainee
from flatfsdp.parity.trained import Trained

KINDS = ("losses", "gradients", "parameters", "optimizer state")


class Kept(NamedTuple):
    """A tensor that a run has left behind, on the CPU.

    Attributes:
        tensor: values; 1-D for a shard.
        parameters: the parameters that its elements belong to, in order; empty if to none.
    """

    tensor: Tensor
    parameters: tuple[Elements, ...] = ()


class Elements(NamedTuple):
    """Elements [start, stop) of a shard, which belong to one parameter.

    Attributes:
        first: index of the first of them in the flattened parameter.
    """

    start: int
    stop: int
    name: str
    shape: tuple[int, ...]
    first: int


NamedTensors = dict[str, Kept]


@dataclass(frozen=True, eq=False)
class GradientRecorder:
    """`AfterBackward` that keeps a copy of this rank's reduced gradient shards of every step.

    Attributes:
        damages: whether one bit of those of the second step, or of the only one, is flipped before that.
        gradients: copies on the CPU, taken before clipping, under names such as "step 3, <unit>".
    """

    damages: bool = False
    gradients: NamedTensors = field(default_factory=dict)

    def __call__(self, step: int, trainee: Trainee) -> None:
        """Copies the gradients of one step."""
        if self.damages and step == min(1, trainee.steps - 1):
            flip_lowest_bit(trainee.model)
        for name, shard in _shards(trainee.model).items():
            grads = [parameter.grad for parameter, _, _ in shard.master.local_shards]
            if any(grad is not None for grad in grads):
                joined = _joined(shard.master, grads)
                self.gradients[f"step {step}, {name}"] = Kept(joined, shard.parameters)


def flip_lowest_bit(model: nn.Module) -> None:
    """Flips the lowest bit of one gradient element of the first unit, the largest one."""
    grads = (parameter.grad for parameter in model.parameters())
    # A rank may have no elements of a parameter.
    grad = next(grad.detach() for grad in grads if grad is not None and grad.numel())
    grad.view(torch.int32)[grad.abs().argmax()] ^= 1


def evidence(trained: Trained, gradients: NamedTensors) -> dict[str, NamedTensors]:
    """All evidence of a run on one rank, on the CPU, for each of `KINDS`."""
    shards = _shards(trained.model)
    state: NamedTensors = {}
    for name, (master, elements) in shards.items():
        if not elements:
            # All padding: an optimizer has state for such a flat parameter, and none for empty parts.
            continue
        of_portions = [trained.optimizer.state.get(parameter, {}) for parameter, _, _ in master.local_shards]
        for key in dict.fromkeys(key for each in of_portions for key in each):
            state[f"{name}.{key}"] = Kept(_joined(master, [each.get(key) for each in of_portions]), elements)
    parameters = {
        name: Kept(master.flat.detach().cpu(), elements) for name, (master, elements) in shards.items()
    }
    buffers = {f"buffer {name}": Kept(buffer.detach().cpu()) for name, buffer in _buffers(trained.model)}
    return {
        "losses": {f"step {step}": Kept(losses_m) for step, losses_m in enumerate(trained.local_losses)},
        "gradients": gradients,
        "parameters": {**parameters, **buffers},
        "optimizer state": state,
    }


class _Shard(NamedTuple):
    master: MasterShard
    parameters: tuple[Elements, ...]


def _shards(model: nn.Module) -> dict[str, _Shard]:
    """This rank's flat shards by the name of unit and group."""
    found = {}
    for prefix, group in named_groups(model):
        ranks = group.master.grid.shard
        elements = tuple(
            Elements(
                piece.shard_offset,
                piece.shard_offset + piece.stop - piece.start,
                prefix + piece.slot.name,
                tuple(piece.slot.shape),
                piece.start,
            )
            for piece in group.layout.pieces(ranks.rank, ranks.size)
        )
        found[prefix + group.flat_name] = _Shard(group.master, elements)
    return found


def _buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields all buffers of the model's own, such as running statistics, under their original names."""
    for prefix, module in prefixed_modules(model):
        for name, buffer in module.named_buffers(recurse=False):
            yield prefix + name, buffer


def _joined(master: MasterShard, of_portions: Sequence[Tensor | None]) -> Tensor:
    """Joins the values that an optimizer has for the portions of a shard, however cut, on the CPU.

    Returns:
        One element for each element of the shard, zero where there is none; for single numbers, such as a
        count of steps, the distinct ones.
    """
    found = [
        (torch.as_tensor(value).detach().cpu(), portion)
        for value, portion in zip(of_portions, master.local_shards, strict=True)
        if value is not None
    ]
    if all(value.dim() == 0 for value, _ in found):
        return torch.stack([value for value, _ in found]).unique()
    whole = torch.zeros(master.flat.numel(), dtype=found[0][0].dtype)
    for value, (_, start, stop) in found:
        whole[start:stop] = value
    return whole


def differences_on_all_ranks(
    off: dict[str, NamedTensors], on: dict[str, NamedTensors], rank: Rank
) -> dict[str, list[str]]:
    """Finds the first difference on each rank that has one, by kind of evidence; equal on every rank."""
    mine = {kind: first_difference(off[kind], on[kind]) for kind in KINDS}
    everyones: list[dict[str, str | None]] = [{}] * rank.world
    dist.all_gather_object(everyones, mine)
    return {
        kind: [f"rank {index}: {found[kind]}" for index, found in enumerate(everyones) if found[kind]]
        for kind in KINDS
    }


def first_difference(off: NamedTensors, on: NamedTensors) -> str | None:
    """Names the first tensor that differs, and how much of it; None if all are equal."""
    if off.keys() != on.keys():
        return f"only one run has {sorted(off.keys() ^ on.keys())[0]}"
    for name, kept in off.items():
        note = _difference(kept.tensor, on[name].tensor, kept.parameters)
        if note is not None:
            return f"{name}: {note}"
    return None


def _difference(off: Tensor, on: Tensor, parameters: Sequence[Elements]) -> str | None:
    """Describes the difference of two tensors; None if their bits are equal.

    Args:
        off: tensor of the run with the switch off.
        on: tensor of the run with the switch on.
        parameters: parameters that the elements belong to.
    """
    if off.shape != on.shape or off.dtype != on.dtype:
        return f"{off.dtype} {tuple(off.shape)} and {on.dtype} {tuple(on.shape)}"
    # A NaN counts as a difference: two broken runs prove nothing about each other.
    if bool(off.isnan().any()) or bool(on.isnan().any()):
        return f"{int(off.isnan().sum())} NaN with the switch off, {int(on.isnan().sum())} with it on"
    if torch.equal(_bits(off), _bits(on)):
        return None
    differs = _bits(off) != _bits(on)
    first = int(differs.int().argmax())
    values = f"{off.flatten()[first].item()!r} and {on.flatten()[first].item()!r}"
    return f"{int(differs.sum())} of {off.numel()} elements, the first {_place(first, parameters)}{values}"


def _place(element: int, parameters: Sequence[Elements]) -> str:
    """Names the parameter, and the index in it, of an element of a shard."""
    for each in parameters:
        if each.start <= element < each.stop:
            rest, indices = each.first + element - each.start, []
            for size in reversed(each.shape):
                rest, index = divmod(rest, size)
                indices.append(index)
            return f"{each.name}[{', '.join(map(str, reversed(indices)))}]: "
    return ""


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bits(tensor: Tensor) -> Tensor:
    """Views the elements as integers of their size, which also tell 0.0 from -0.0."""
    return tensor.contiguous().view(-1).view(_INTEGERS[tensor.element_size()])
