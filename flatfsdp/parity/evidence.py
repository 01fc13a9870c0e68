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
from flatfsdp.engine.whole.units import named_groups
from flatfsdp.parity.loop import Trained, Trainee

KINDS = ("losses", "gradients", "parameters", "optimizer state")


class Kept(NamedTuple):
    """A tensor that a run has left behind, on the CPU.

    Attributes:
        tensor: values; of a parameter, those of this rank's part, 1-D.
        shape: shape of the whole parameter; None for anything else.
        first: index of the first value in the flattened parameter.
    """

    tensor: Tensor
    shape: Sequence[int] | None = None
    first: int = 0


NamedTensors = dict[str, Kept]


@dataclass(frozen=True, eq=False)
class GradientRecorder:
    """`AfterBackward` that keeps a copy of this rank's reduced gradients of every step.

    Attributes:
        damages: whether one bit of those of the second step, or of the only one, is flipped before that.
        gradients: copies on the CPU, taken before clipping, under names such as "step 3, <parameter>".
    """

    damages: bool = False
    gradients: NamedTensors = field(default_factory=dict)

    def __call__(self, step: int, trainee: Trainee) -> None:
        """Copies the gradients of one step."""
        if self.damages and step == min(1, trainee.steps - 1):
            flip_lowest_bit(trainee.model)
        for name, parameter, shape, first in _local_shards(trainee.model):
            if parameter.grad is not None:
                grad = parameter.grad.detach().as_subclass(Tensor).to("cpu", copy=True)
                self.gradients[f"step {step}, {name}"] = Kept(grad, shape, first)


def flip_lowest_bit(model: nn.Module) -> None:
    """Flips the lowest bit of one gradient element of the first unit, the largest one."""
    grads = (parameter.grad for parameter in model.parameters())
    # A rank may have no elements of a parameter.
    grad = next(grad.detach() for grad in grads if grad is not None and grad.numel())
    grad.view(torch.int32)[grad.abs().argmax()] ^= 1


def evidence(trained: Trained, gradients: NamedTensors) -> dict[str, NamedTensors]:
    """All evidence of a run on one rank, on the CPU, for each of `KINDS`."""
    parameters: NamedTensors = {}
    state: NamedTensors = {}
    for name, parameter, shape, first in _local_shards(trained.model):
        parameters[name] = Kept(parameter.detach().cpu(), shape, first)
        for key, value in trained.optimizer.state.get(parameter, {}).items():
            state[f"{name}.{key}"] = Kept(torch.as_tensor(value).detach().cpu(), shape, first)
    for prefix, group in named_groups(trained.model):
        # Empty local shards have no elements to compare, but an optimizer counts steps for them as well.
        states = (trained.optimizer.state.get(parameter, {}) for parameter in group.master.parameters)
        steps = [torch.as_tensor(each["step"]).detach().cpu() for each in states if "step" in each]
        if steps:
            state[f"{prefix}{group.flat_name}.step"] = Kept(torch.stack(steps).unique())
    # Buffers of the model's own, such as running statistics, under their original names.
    for prefix, module in prefixed_modules(trained.model):
        for name, buffer in module.named_buffers(recurse=False):
            parameters[f"buffer {prefix}{name}"] = Kept(buffer.detach().cpu())
    losses = {f"step {step}": Kept(losses_m) for step, losses_m in enumerate(trained.local_losses)}
    if trained.numbers:
        losses = {
            f"{step}, microbatch {number}": Kept(loss)
            for step, kept in losses.items()
            for number, loss in zip(trained.numbers, kept.tensor, strict=True)
        }
    return {
        "losses": losses,
        "gradients": gradients,
        "parameters": parameters,
        "optimizer state": state,
    }


def _local_shards(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, Sequence[int], int]]:
    """Yields this rank's parts of all parameters, but for empty ones.

    Each comes with its original name, the shape of the whole parameter, and the index of the part's first
    element in that, flattened.
    """
    for prefix, group in named_groups(model):
        begin = group.master.grid.shard.rank * group.master.flat.numel()
        for (parameter, _, _), slot in zip(group.master.local_shards, group.layout.slots, strict=True):
            if parameter.numel():
                yield prefix + slot.name, parameter, slot.shape, max(begin - slot.offset, 0)


def joined(of_ranks: Sequence[NamedTensors]) -> NamedTensors:
    """Evidence of several ranks as if one rank had run: whole parameters in place of parts."""
    parts: dict[str, dict[int, Kept]] = {}
    for of_rank in of_ranks:
        for name, kept in of_rank.items():
            # Replicas have the same parts, and an optimizer one count of steps for each.
            first = kept.first if kept.tensor.dim() else 0
            parts.setdefault(name, {}).setdefault(first, kept)
    return {name: _whole([of_name[first] for first in sorted(of_name)]) for name, of_name in parts.items()}


def _whole(parts: Sequence[Kept]) -> Kept:
    first = parts[0]
    return first if len(parts) == 1 else Kept(torch.cat([part.tensor for part in parts]), first.shape)


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
        note = _difference(kept, on[name].tensor)
        if note is not None:
            return f"{name}: {note}"
    return None


def _difference(kept: Kept, on: Tensor) -> str | None:
    """Describes the difference of two tensors; None if their bits are equal.

    Args:
        kept: tensor of the run with the switch off.
        on: tensor of the run with the switch on.
    """
    off = kept.tensor
    if off.shape != on.shape or off.dtype != on.dtype:
        return f"{off.dtype} {tuple(off.shape)} and {on.dtype} {tuple(on.shape)}"
    # A NaN counts as a difference: two broken runs prove nothing about each other.
    if bool(off.isnan().any()) or bool(on.isnan().any()):
        return f"{int(off.isnan().sum())} NaN with the switch off, {int(on.isnan().sum())} with it on"
    differs = _bits(off) != _bits(on)
    if not bool(differs.any()):
        return None
    first = int(differs.int().argmax())
    place = ""
    if kept.shape and off.dim():
        place = f"{[int(i) for i in torch.unravel_index(torch.tensor(kept.first + first), kept.shape)]}: "
    values = f"{off.flatten()[first].item()!r} and {on.flatten()[first].item()!r}"
    return f"{int(differs.sum())} of {off.numel()} elements, the first {place}{values}"


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bits(tensor: Tensor) -> Tensor:
    """Views the elements as integers of their size, which also tell 0.0 from -0.0."""
    return tensor.contiguous().view(-1).view(_INTEGERS[tensor.element_size()])
