"""What is compared: every loss, gradient, parameter and optimizer state of two runs, bit for bit.

In:   a run's `Trained` and the reduced gradients that a `GradientRecorder` kept.
Out:  for each kind of evidence the first place on each rank where two runs differ, or nothing.
Next: `verify.py`, `cli/verify.py` and `cli/matrix.py` make rows of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from flatfsdp.comm.launch import Rank
from flatfsdp.contract.transparent import prefixed_modules
from flatfsdp.engine.storage.master import MasterShard
from flatfsdp.engine.units import named_groups
from flatfsdp.parity.summary import RunSummary
from flatfsdp.parity.trained import AfterBackward, Trained

KINDS = ("losses", "gradients", "parameters", "optimizer state")


class Kept(NamedTuple):
    """What a run has left behind, on the CPU.

    Attributes:
        tensor: 1-D, if it is of a shard.
        parameters: of which parameter the elements are, in order; empty if of none.
    """

    tensor: Tensor
    parameters: tuple[Elements, ...] = ()


class Elements(NamedTuple):
    """The elements [start, stop) of a shard, which belong to one parameter.

    Attributes:
        first: the number of the first of them in the parameter, flattened.
    """

    start: int
    stop: int
    name: str
    shape: tuple[int, ...]
    first: int


NamedTensors = dict[str, Kept]


@dataclass(frozen=True, eq=False)
class GradientRecorder:
    """Keeps a copy of this rank's reduced gradient shards of every step: an `AfterBackward`.

    Attributes:
        gradients: "step 3, <unit>" -> a copy on the CPU, as it was before clipping.
    """

    gradients: NamedTensors = field(default_factory=dict)

    def __call__(self, step: int, model: nn.Module) -> None:
        """Copies the gradients of one step."""
        for name, shard in _shards(model).items():
            grads = [parameter.grad for parameter, _, _ in shard.master.portions]
            if any(grad is not None for grad in grads):
                joined = _joined(shard.master, grads)
                self.gradients[f"step {step}, {name}"] = Kept(joined, shard.parameters)


@dataclass(frozen=True)
class Saboteur:
    """An `AfterBackward` that flips one bit in one step on the last rank, then lets `recorder` see it."""

    recorder: GradientRecorder
    rank: Rank
    at_step: int

    def __call__(self, step: int, model: nn.Module) -> None:
        """Flips the bit if it is time, and records."""
        # One rank alone, and not the one that reports: the verdict must come from all of them.
        if step == self.at_step and self.rank.index == self.rank.world - 1:
            flip_lowest_bit(model)
        self.recorder(step, model)


def flip_lowest_bit(model: nn.Module) -> None:
    """Changes one gradient element by the least that FP32 can express: the largest of the first unit's."""
    grads = (parameter.grad for parameter in model.parameters())
    # A rank may have no element of a parameter.
    grad = next(grad.detach() for grad in grads if grad is not None and grad.numel())
    grad.view(torch.int32)[grad.abs().argmax()] ^= 1


def evidence(trained: Trained, gradients: NamedTensors) -> dict[str, NamedTensors]:
    """All that one rank saw of a run, for each of `KINDS`, on the CPU."""
    shards = _shards(trained.model)
    state: NamedTensors = {}
    for name, (master, elements) in shards.items():
        if not elements:
            # All padding: an optimizer has a state for a flat parameter of it, and none for empty parts.
            continue
        of_portions = [trained.optimizer.state.get(parameter, {}) for parameter, _, _ in master.portions]
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
    """This rank's flat shards by the name of unit and group, wrapped or in place."""
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
    """All buffers of the model's own, such as running statistics, under their names in the plain model."""
    for prefix, module in prefixed_modules(model):
        for name, buffer in module.named_buffers(recurse=False):
            yield prefix + name, buffer


def _joined(master: MasterShard, of_portions: Sequence[Tensor | None]) -> Tensor:
    """What an optimizer has for each portion of a shard, as one tensor on the CPU, however the shard is cut.

    Returns:
        One element for each of the shard, zero where there is none; of numbers, such as a count of steps,
        those that differ.
    """
    found = [
        (torch.as_tensor(value).detach().cpu(), portion)
        for value, portion in zip(of_portions, master.portions, strict=True)
        if value is not None
    ]
    if all(value.dim() == 0 for value, _ in found):
        return torch.stack([value for value, _ in found]).unique()
    whole = torch.zeros(master.flat.numel(), dtype=found[0][0].dtype)
    for value, (_, start, stop) in found:
        whole[start:stop] = value
    return whole


@dataclass(frozen=True)
class Compared:
    """Two runs, with a switch off and on.

    Attributes:
        differences: for each kind of evidence, the first difference on each rank that has one: the step, the
            unit, and the element of a parameter.
    """

    off: RunSummary
    on: RunSummary
    differences: dict[str, list[str]]

    @property
    def equal(self) -> bool:
        """Whether all bits are."""
        return not any(self.differences.values())

    def lines(self, name: str) -> list[str]:
        """What differs, by kind of evidence and rank."""
        return [
            f"{name}, {kind}: first difference on {place}"
            for kind, places in self.differences.items()
            for place in places
        ]


Run = Callable[[AfterBackward], Trained]
"""Trains, and calls its argument after each step's backwards."""


def compared(off: Run, on: Run, rank: Rank, steps: int, *, self_test: bool) -> Compared:
    """Runs both, and compares them on all ranks.

    Args:
        steps: of each run.
        self_test: damage one bit of one gradient on the last rank, with the switch on.
    """
    first, first_evidence = _observed(off, rank, steps, sabotage=False)
    second, second_evidence = _observed(on, rank, steps, sabotage=self_test)
    return Compared(first, second, differences_on_all_ranks(first_evidence, second_evidence, rank))


def _observed(
    run: Run, rank: Rank, steps: int, *, sabotage: bool
) -> tuple[RunSummary, dict[str, NamedTensors]]:
    """One run and its evidence; the model is freed."""
    recorder = GradientRecorder()
    trained = run(Saboteur(recorder, rank, at_step=min(1, steps - 1)) if sabotage else recorder)
    return RunSummary.of(trained), evidence(trained, recorder.gradients)


def differences_on_all_ranks(
    off: dict[str, NamedTensors], on: dict[str, NamedTensors], rank: Rank
) -> dict[str, list[str]]:
    """The first difference on each rank that has one, by kind of evidence; the same on every rank."""
    mine = {kind: first_difference(off[kind], on[kind]) for kind in KINDS}
    everyones: list[dict[str, str | None]] = [{}] * rank.world
    dist.all_gather_object(everyones, mine)
    return {
        kind: [f"rank {index}: {found[kind]}" for index, found in enumerate(everyones) if found[kind]]
        for kind in KINDS
    }


def first_difference(off: NamedTensors, on: NamedTensors) -> str | None:
    """Names the first tensor that is not the same in both, and says how much of it; None if all are."""
    if off.keys() != on.keys():
        return f"only one run has {sorted(off.keys() ^ on.keys())[0]}"
    for name, kept in off.items():
        note = _difference(kept.tensor, on[name].tensor, kept.parameters)
        if note is not None:
            return f"{name}: {note}"
    return None


def _difference(off: Tensor, on: Tensor, parameters: Sequence[Elements]) -> str | None:
    """None if there are the same bits in both.

    Args:
        parameters: of which the elements are.
    """
    if off.shape != on.shape or off.dtype != on.dtype:
        return f"{off.dtype} {tuple(off.shape)} and {on.dtype} {tuple(on.shape)}"
    # A NaN is not equal to itself: two broken runs prove nothing about each other.
    if bool(off.isnan().any()) or bool(on.isnan().any()):
        return f"{int(off.isnan().sum())} NaN with the switch off, {int(on.isnan().sum())} with it on"
    if torch.equal(_bits(off), _bits(on)):
        return None
    differs = _bits(off) != _bits(on)
    first = int(differs.int().argmax())
    values = f"{off.flatten()[first].item()!r} and {on.flatten()[first].item()!r}"
    return f"{int(differs.sum())} of {off.numel()} elements, the first {_place(first, parameters)}{values}"


def _place(element: int, parameters: Sequence[Elements]) -> str:
    """The parameter, and which of its elements this element of a shard is."""
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
    """The elements as integers of their size, which also tell 0.0 from -0.0."""
    return tensor.contiguous().view(-1).view(_INTEGERS[tensor.element_size()])
