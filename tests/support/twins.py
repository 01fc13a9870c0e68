"""A sharded model and its plain twin: the same steps, the plain one on the data of all ranks.

Plain gradients are the mean over ranks of each rank's sum over microbatches.  A penalty on `parameters()` is
added once a microbatch and undivided: each rank has a part of it, and all parts together are one penalty.

    sharded, rank r    for each microbatch: (loss(r) + penalty of this rank's parts).backward()
    plain              sum over ranks of loss(r) / ranks, + the penalty of whole parameters
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

import flatfsdp.optim
from flatfsdp import by_class, microbatches, shard
from flatfsdp.contract.whole_shape import whole_shape
from flatfsdp.engine.api.wrap import WrapPolicy

WIDTH = 4
TOLERANCE = 1e-6
"""Relative to the largest value that is compared."""


class Slots(nn.Module):
    """A unit of several layers, of which a call uses some; a parameter has one element, and one is zero."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))
        self.scale = nn.Parameter(torch.full((1,), 0.8))
        self.shift = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor, used: Sequence[int]) -> Tensor:
        for index in used:
            x = x + self.scale * torch.tanh(self.layers[index](x)) + self.shift
        return x


class SlotNet(nn.Module):
    """Units of slots, and two heads; inlet and heads are slots of the root's unit."""

    def __init__(self, slots: Sequence[int] = (2, 1)) -> None:
        super().__init__()
        self.inlet = nn.Linear(WIDTH, WIDTH)
        self.units = nn.ModuleList(Slots(count) for count in slots)
        self.heads = nn.ModuleList(nn.Linear(WIDTH, 2) for _ in range(2))

    def forward(self, x: Tensor, uses: Mapping[int, Sequence[int]], head: int) -> Tensor:
        """The loss; `uses` has the units that run, and the slots that run in each."""
        x = self.inlet(x)
        for unit, slots in uses.items():
            x = self.units[unit](x, slots)
        return (self.heads[head](x) - 1).square().mean()


def slot_net(slots: Sequence[int] = (2, 1)) -> SlotNet:
    torch.manual_seed(0)
    return SlotNet(slots)


@dataclass(frozen=True)
class Penalty:
    """A regularizer of the parameters that a model lists.

    Attributes:
        weight: factor; an annealed one begins with 0.
        from_start: whether it is of the way from where the training began, which is 0 in the first step.
        only: a part of the names of the parameters that it is of.
    """

    weight: float
    from_start: bool = False
    only: str = ""

    def of(self, parameters: Mapping[str, Tensor], starts: Mapping[str, Tensor]) -> Tensor:
        chosen = [name for name in parameters if self.only in name]
        away = [parameters[n] - starts[n] if self.from_start else parameters[n] for n in chosen]
        return self.weight * sum((each.pow(2).sum() for each in away), torch.zeros(()))


class Microbatch(NamedTuple):
    """What one microbatch computes.

    Attributes:
        uses: for each rank, the units that run and the slots that run in each; round again for more ranks.
        head: number of the head that runs.
        order: the penalty is added to the loss, or has a backward of its own, before or after the loss's.
    """

    uses: Sequence[Mapping[int, Sequence[int]]] = ({0: (0, 1), 1: (0,)},)
    head: int = 0
    penalty: Penalty | None = None
    order: Literal["together", "before", "after"] = "together"

    def loss(self, model: nn.Module, rank: int, place: tuple[int, int]) -> Tensor:
        """`place`: numbers of the step and of the microbatch, which decide what the rank computes on."""
        generator = torch.Generator().manual_seed(hash((rank, *place)))
        return model(torch.randn(3, WIDTH, generator=generator), self.uses[rank % len(self.uses)], self.head)


Update = Literal["step", "torch clips", "model clips", "optimizer clips", "scaler"]
MAX_NORM = 0.1
SCALE = 4.0


def _optimizer(kind: str, params: Any, decay: float, max_norm: float | None = None) -> Any:
    """`kind`: whose, what and how, as in "our SGD nesterov" or "torch AdamW fused"; "our" ones clip if they
    are given a norm."""
    whose, what, *how = kind.split()
    namespace: Any = flatfsdp.optim if whose == "our" else torch.optim
    options: dict[str, Any] = {"max_grad_norm": max_norm} if whose == "our" else {}
    if what == "SGD":
        options |= {"lr": 0.02, "momentum": 0.9, "nesterov": "nesterov" in how}
    else:
        options |= {"lr": 1e-2}
    options |= {"fused": True} if "fused" in how else {"foreach": False} if "single" in how else {}
    return getattr(namespace, what)(params, weight_decay=decay, **options)


class Twins:
    """Both models, each with an optimizer.

    Args:
        net: the model; it is copied before one of both is sharded.
        kind: of the optimizers, such as "torch AdamW" or "our SGD nesterov".
        update: who clips, if anybody does, or whether a scaler makes the step.
        groups: whether matrices and other parameters are groups of their own.
        options: of `shard`.

    Attributes:
        ours, plain: the two models.
    """

    def __init__(
        self,
        net: nn.Module,
        kind: str,
        *,
        policy: WrapPolicy | None = None,
        update: Update = "step",
        decay: float = 0.1,
        groups: bool = False,
        **options: Any,
    ) -> None:
        self.plain = copy.deepcopy(net)
        self.ours: Any = shard(net, policy or by_class(Slots), **options)
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        self._update = update
        self._parts, self._theirs = (dict(each.named_parameters()) for each in (self.ours, self.plain))
        assert self._parts.keys() == self._theirs.keys()
        self._starts = [{n: p.detach().clone() for n, p in of.items()} for of in (self._parts, self._theirs)]
        max_norm = MAX_NORM if update == "optimizer clips" else None
        grouped = _by_dimensions if groups else lambda parameters: list(parameters)
        self.optimizer = _optimizer(kind, grouped(self.ours.parameters()), decay, max_norm)
        self.plain_optimizer = _optimizer(
            kind.replace("our", "torch"), grouped(self.plain.parameters()), decay
        )
        scaled = update == "scaler"
        self._scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, enabled=scaled)
        self._steps = 0

    def freeze(self, names: Sequence[str]) -> None:
        """Freezes these parameters of both, or modules, and unfreezes all others."""
        for name, parameter in self._parts.items():
            frozen = any(f"{name}.".startswith(f"{each}.") for each in names)
            for each in (parameter, self._theirs[name]):
                each.requires_grad_(not frozen)

    def step(self, step: Sequence[Microbatch], *, by_no_sync: bool = False) -> None:
        """Trains both by one step, and compares all that can be seen of it; keeps the gradients."""
        self.backward(step, by_no_sync=by_no_sync)
        self.compare_gradients()
        self.update()
        self.compare_values()
        self.compare_states()

    def train(self, *steps: Sequence[Microbatch], by_no_sync: bool = False) -> None:
        """Several steps, after each of which the gradients go."""
        for step in steps:
            self.step(step, by_no_sync=by_no_sync)
            self.zero_grad()

    def backward(self, step: Sequence[Microbatch], *, by_no_sync: bool = False) -> None:
        if by_no_sync:
            with self.ours.no_sync():
                for number, one in enumerate(step[:-1]):
                    self._backward_of_ours(one, number)
            self._backward_of_ours(step[-1], len(step) - 1)
        else:
            for number, one in microbatches(self.ours, enumerate(step)):
                self._backward_of_ours(one, number)
        self._backward_of_plain(step)
        self._steps += 1

    def _backward_of_ours(self, one: Microbatch, number: int) -> None:
        def penalty() -> Tensor:
            assert one.penalty is not None
            return one.penalty.of(self._parts, self._starts[0])

        if one.penalty is not None and one.order == "before":
            self._scaler.scale(penalty()).backward()
        loss = one.loss(self.ours, self._rank, (self._steps, number))
        if one.penalty is not None and one.order == "together":
            loss = loss + penalty()
        self._scaler.scale(loss).backward()
        if one.penalty is not None and one.order == "after":
            self._scaler.scale(penalty()).backward()

    def _backward_of_plain(self, step: Sequence[Microbatch]) -> None:
        left = self._taken_grads()
        of_ranks = []
        for rank in range(self._ranks):
            for number, one in enumerate(step):
                one.loss(self.plain, rank, (self._steps, number)).backward()
            of_ranks.append(self._taken_grads())
        mean = {n: grad / self._ranks for n, grad in _sum(of_ranks).items()}
        for one in step:
            if one.penalty is not None:
                one.penalty.of(self._theirs, self._starts[1]).backward()
        for name, grad in _sum([left, mean, self._taken_grads()]).items():
            self._theirs[name].grad = grad

    def _taken_grads(self) -> dict[str, Tensor]:
        grads = {name: p.grad for name, p in self._theirs.items() if p.grad is not None}
        self.plain.zero_grad()
        return grads

    def update(self) -> None:
        """One step of both optimizers."""
        norm = found = None
        if self._update != "step" and self._update != "scaler":
            found = nn.utils.clip_grad_norm_(self.plain.parameters(), MAX_NORM)
        if self._update == "torch clips":
            norm = nn.utils.clip_grad_norm_(self.ours.parameters(), MAX_NORM)
        elif self._update == "model clips":
            norm = self.ours.clip_grad_norm_(MAX_NORM)
        self._scaler.step(self.optimizer)
        self._scaler.update()
        self.plain_optimizer.step()
        if self._update == "optimizer clips":
            norm = self.optimizer.grad_norm
        if norm is not None:
            torch.testing.assert_close(norm, found, rtol=1e-5, atol=1e-7)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)
        self.plain_optimizer.zero_grad(set_to_none)

    # ---- comparisons, of what all ranks have together, so that all fail alike ------------------------

    def compare_gradients(self) -> None:
        """Which of them are None, on all ranks alike, and the values of the others."""
        scale = SCALE if self._update == "scaler" else 1.0
        found = _over_ranks([_plain(parameter.grad) for parameter in self._parts.values()])
        for (name, their), parts in zip(self._theirs.items(), found, strict=True):
            self._compare(f"gradient of {name}", parts, None if their.grad is None else scale * their.grad)

    def compare_values(self) -> None:
        """Compares by the largest weight, as an error of 1e-6 of it is none of a step."""
        state = self.ours.state_dict()
        theirs = self.plain.state_dict()
        largest = max(float(value.abs().max()) for value in theirs.values())
        far = {name: float((state[name] - value).abs().max()) / largest for name, value in theirs.items()}
        far = {name: error for name, error in far.items() if not error <= TOLERANCE}
        assert not far, f"values differ, by parts of the largest: {far}"

    def compare_states(self) -> None:
        """Which parameters have a state, step counts exactly, and moments."""
        for key in ("step", "momentum_buffer", "exp_avg", "exp_avg_sq"):
            if key == "step" and isinstance(self.optimizer, flatfsdp.optim.SGD):
                continue  # It counts, and PyTorch's does not.
            has_elements = [parameter.numel() > 0 for parameter in self._parts.values()]
            own = [_plain(self.optimizer.state.get(p, {}).get(key)) for p in self._parts.values()]
            found = _over_ranks(own, has_elements)
            for (name, their), parts in zip(self._theirs.items(), found, strict=True):
                expected = self.plain_optimizer.state.get(their, {}).get(key)
                if key == "step":
                    counts = [{None if n is None else float(n) for n in each} for each in (parts, [expected])]
                    assert counts[0] == counts[1], f"steps of {name}: {counts[0]}, not {counts[1]}"
                else:
                    self._compare(f"{key} of {name}", parts, expected)

    def _compare(self, label: str, parts: Sequence[Tensor | None], expected: Tensor | None) -> None:
        """Compares what ranks have of a parameter with what the plain one has; None if there is nothing."""
        assert {part is None for part in parts} == {expected is None}, (
            f"{label}: {_described(parts)}, not {_described([expected])}"
        )
        if expected is not None:
            whole = torch.cat([part for part in parts if part is not None]).view(expected.shape)
            error = float((whole - expected).abs().max())
            assert error <= 10 * TOLERANCE * max(float(expected.abs().max()), 0.1), (
                f"{label} is off by {error}"
            )


def _by_dimensions(parameters: Any) -> list[dict[str, Any]]:
    listed = list(parameters)
    matrices = [p for p in listed if len(whole_shape(p)) > 1]
    others = [p for p in listed if len(whole_shape(p)) <= 1]
    return [{"params": matrices}, {"params": others, "weight_decay": 0.0}]


def _sum(grads: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    total: dict[str, Tensor] = {}
    for each in grads:
        for name, grad in each.items():
            total[name] = total[name] + grad if name in total else grad
    return total


def _plain(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().as_subclass(Tensor).clone()


def _described(values: Sequence[Tensor | None]) -> str:
    return ", ".join("None" if value is None else f"{value.norm():.2g}" for value in values)


def _over_ranks(own: Sequence[Tensor | None], counts: Sequence[bool] | None = None) -> list[list[Any]]:
    """For each parameter, what the ranks have of it, in rank order; without those for whom it counts not."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, list(zip(own, counts or [True] * len(own), strict=True)))
    return [[value for value, does in of_ranks if does] for of_ranks in zip(*gathered, strict=True)]
