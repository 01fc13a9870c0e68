"""Trains one plan on one rank, and says which numbers are not those of plain data parallel.

The reference is made by hand in each rank's process: one plain copy of the model a rank, each with its own
rank's data and control flow.  Gradients are averaged over the copies, as DDP does with
`find_unused_parameters`; a parameter that a rank did not use counts there as one with a zero gradient.

Two things have no counterpart in DDP, or a different one:

    one more reduction     ranks reduce different numbers of times: nothing can be right
    skips the optimizer    whose shard it is does not update it, for all ranks that share these parameters;
                           with a mesh of (N, 1) that is DDP's behaviour, the copies differ from then on
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatfsdp.engine.storage.group import FlatGroup
from flatfsdp.engine.storage.shard_grad import plain
from flatfsdp.engine.whole.units import keys_of_slots
from flatfsdp.flat.layout import Piece
from tests.support.diverging.plans import Block, Plan, What
from tests.support.stress.models import (
    BATCH,
    VOCAB,
    Call,
    Unsharded,
    apply,
    apply_recomputed,
    build_node,
    hidden_of,
)
from tests.support.stress.training import PRECISIONS, SCHEDULES, Tolerance, quiet, wrap

TOLERANCES = {"fp32": Tolerance(1e-5, 1e-6), "bf16": Tolerance(2e-2, 1e-3)}
"""In bf16 the same operations are rounded in the same places; sums over ranks and microbatches differ."""

EXTRA = 9
"""Number of the microbatch that only one rank has."""

LEARNING_RATE = 0.1


# ---- the model ------------------------------------------------------------------------------------------


@dataclass
class Route(Call):
    """A call that says which blocks run, in which order, and which of them return their input."""

    order: tuple[int, ...] = ()
    unchanged: tuple[int, ...] = ()


class BlockModule(nn.Module):
    def __init__(self, index: int, block: Block, width: int) -> None:
        super().__init__()
        self.body = build_node(block.body, width)
        self.recompute = block.recompute
        self.is_unit = True
        self._index = index

    def forward(self, value: Tensor, *, call: Route) -> Tensor:
        if self._index in call.unchanged:
            return value
        return 0.5 * value + hidden_of(apply(self.body, value, call))


class Model(Unsharded):
    """Start, blocks in the order of the call, head; returns the loss of one microbatch, 0-dim, in FP32."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.scale = nn.Parameter(1 + torch.rand(plan.width)) if plan.start == "scale" else None
        self.embedding = nn.Embedding(VOCAB, plan.width) if plan.start == "embedding" else None
        self.blocks = nn.ModuleList(BlockModule(i, b, plan.width) for i, b in enumerate(plan.blocks))
        self.head = None if plan.head == "nothing" else nn.Linear(plan.width, VOCAB)
        if plan.head == "tied":
            self.head.weight = self.embedding.weight
        self._recomputes = [block.recompute for block in plan.blocks]

    def forward(self, hidden: Tensor, *, call: Route) -> Tensor:
        if self.scale is not None:
            hidden = hidden * self.scale
        if self.embedding is not None:
            hidden = hidden + self.embedding(call.tokens)
        for index in call.order:
            hidden = apply_recomputed(self.blocks[index], hidden, call, self._recomputes[index])
        if self.head is None:
            return (hidden.float() - call.target.float()).square().mean()
        return F.cross_entropy(self.head(hidden).float(), call.tokens)


def build(plan: Plan) -> Model:
    torch.manual_seed(plan.seed)
    return Model(plan)


# ---- what is trained: a FlatFSDP, or one of the plain copies -------------------------------------------

Numbers = dict[str, Tensor]
"""By parameter, under its name in the plain model."""


class Part(NamedTuple):
    """Some elements, flattened, of something that was recorded under a label."""

    label: str
    start: int = 0
    stop: int | None = None


Trace = dict[Part, Tensor]


class Sharded:
    """A FlatFSDP and its optimizer; records this rank's shards, without a collective."""

    def __init__(self, plan: Plan) -> None:
        plain = build(plan)
        self._names = set(dict(plain.named_parameters()))
        self.model: Any = wrap(plain, plan, plan.flag)
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=LEARNING_RATE)

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def state(self) -> Numbers:
        return {name: value for name, value in self.model.state_dict().items() if name in self._names}

    def summoned(self) -> AbstractContextManager[None]:
        return self.model.summon_full_params()

    def clip(self, max_norm: float) -> Tensor:
        return self.model.clip_grad_norm_(max_norm)

    def step(self) -> None:
        self._optimizer.step()

    def zero_grad(self) -> None:
        self._optimizer.zero_grad()

    def gradients(self, label: str) -> Trace:
        return self._parts(
            label, lambda shard: torch.zeros_like(shard) if shard.grad is None else plain(shard.grad)
        )

    def parameters(self, label: str) -> Trace:
        return self._parts(label, Tensor.detach)

    def _parts(self, label: str, values: Callable[[Tensor], Tensor]) -> Trace:
        trace = {}
        shards = dict(self.model.named_parameters())
        for name, _, piece in self.pieces():
            trace[Part(f"{label} {name}", piece.start, piece.stop)] = values(shards[name]).clone()
        return trace

    def pieces(self, shard: int | None = None) -> list[tuple[str, FlatGroup, Piece]]:
        """What this rank holds of each parameter, or the one that has this number among those it shares
        them with."""
        found = []
        for (group, slot), names in keys_of_slots(self.model).items():
            ranks = group.grid.shard
            pieces = group.layout.pieces(ranks.rank if shard is None else shard, ranks.size)
            found += [(names[0], group, piece) for piece in pieces if piece.slot is slot]
        return found


class Copy:
    """A plain model that computes in the plan's dtype; parameters and gradients are kept in FP32.

    Attributes:
        values: of all parameters.
        grads: summed over microbatches; zero where there is none.
    """

    def __init__(self, plan: Plan) -> None:
        plain = build(plan)
        self.values: Numbers = {name: p.detach().clone() for name, p in plain.named_parameters()}
        self.grads: Numbers = {}
        self.zero_grad()
        self.model = plain.to(PRECISIONS[plan.dtypes].compute)

    def backward(self, loss: Tensor) -> None:
        loss.backward()
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None:
                self.grads[name] += parameter.grad.float()
                parameter.grad = None

    def state(self) -> Numbers:
        return self.values

    def summoned(self) -> AbstractContextManager[None]:
        return nullcontext()

    def clip(self, max_norm: float) -> Tensor:
        norm = torch.stack([grad.norm() for grad in self.grads.values()]).norm()
        for grad in self.grads.values():
            grad *= (max_norm / norm).clamp(max=1.0)
        return norm

    def step(self) -> None:
        self.load({name: value - LEARNING_RATE * self.grads[name] for name, value in self.values.items()})

    def load(self, values: Numbers) -> None:
        self.values = values
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(values[name])

    def zero_grad(self) -> None:
        self.grads = {name: torch.zeros_like(value) for name, value in self.values.items()}

    def gradients(self, label: str) -> Trace:
        return {Part(f"{label} {name}"): grad.clone() for name, grad in self.grads.items()}

    def parameters(self, label: str) -> Trace:
        return {Part(f"{label} {name}"): value.clone() for name, value in self.values.items()}


# ---- one step -------------------------------------------------------------------------------------------


@dataclass
class Step:
    """One rank's way through one step; what `SCHEDULES` drive."""

    plan: Plan
    number: int
    rank: int
    trained: Sharded | Copy
    trace: Trace
    _losses: dict[int, Tensor] = field(default_factory=dict)

    @property
    def model(self) -> Any:
        return self.trained.model

    @property
    def count(self) -> int:
        return self.plan.microbatches

    def run(self) -> None:
        """Forwards and backwards of all microbatches."""
        SCHEDULES[self.plan.schedule](self)
        if self.diverges("one more reduction"):
            self.trained.backward(self._loss(EXTRA))

    def end(self) -> None:
        """After the gradients have been reduced."""
        self.trace.update(self.trained.gradients(f"step {self.number} gradient"))
        if self.diverges("clips"):
            self._record("norm", self.trained.clip(1e6))
        if isinstance(self.trained, Copy) or not self.diverges("skips the optimizer"):
            self.trained.step()
        self.trained.zero_grad()

    def diverges(self, what: What, microbatch: int | None = None) -> bool:
        """Whether this rank diverges here."""
        plan = self.plan.divergence
        here = (plan.what, plan.rank, plan.step) == (what, self.rank, self.number)
        return here and microbatch in (None, plan.microbatch)

    def forward(self, index: int) -> None:
        self._before(index)
        self._losses[index] = loss = self._loss(index)
        self._record(f"loss {index}", loss)

    def backward(self, index: int) -> None:
        self.trained.backward(self._losses.pop(index))

    def _before(self, index: int) -> None:
        if self.diverges("evaluates", index):
            with torch.no_grad():
                self._record("evaluation", self._loss(EXTRA))
        if self.diverges("forward without backward", index):
            self._record("forward without backward", self._loss(EXTRA))
        if self.diverges("state dict", index):
            for name, value in self.trained.state().items():
                self._record(f"state {name}", value)
        if self.diverges("summons parameters", index):
            with self.trained.summoned():
                pass
        if self.diverges("one more microbatch", index):
            with self.model.no_sync():
                self.trained.backward(self._loss(EXTRA))

    def _loss(self, index: int) -> Tensor:
        plan, divergence = self.plan, self.plan.divergence
        route: dict[str, tuple[int, ...]] = {"order": plan.order}
        if any(map(self.diverges, BLOCKS_RUN, [index] * len(BLOCKS_RUN))):
            route = {"order": divergence.blocks}
        if self.diverges("a block returns its input", index):
            route["unchanged"] = divergence.blocks
        first = divergence.microbatch
        swapped = first, (first + 1) % plan.microbatches
        of = sum(swapped) - index if self.diverges("swaps microbatches") and index in swapped else index
        generator = torch.Generator().manual_seed(((plan.seed * 10 + self.number) * 10 + self.rank) * 10 + of)
        # Numbers that every plan's dtype can hold, so that no copy is made of others.
        dtype = PRECISIONS[plan.dtypes].compute
        hidden, target = torch.randn(2, BATCH, plan.width, generator=generator).bfloat16().to(dtype)
        tokens = torch.randint(0, VOCAB, (BATCH,), generator=generator)
        return self.model(hidden, call=Route(tokens, target, self.rank, index, **route))

    def _record(self, label: str, value: Tensor) -> None:
        self.trace[Part(f"step {self.number} {label}")] = value.detach().clone()


BLOCKS_RUN: tuple[What, ...] = ("another order", "leaves a block out", "runs a block twice")


# ---- one plan -------------------------------------------------------------------------------------------


class Report(NamedTuple):
    """On one rank.

    Attributes:
        error: traceback of the exception that ended the training; empty if none did.
        wrong: the first number that is not plain data parallel's; empty if all are, up to the error.
    """

    error: str
    wrong: str


def check_on_rank(rank: int, world_size: int, plan: Plan) -> Report:
    """Trains the plan, and returns an exception rather than raise it: what other ranks saw counts, too."""
    trace: Trace = {}
    error = ""
    sharded = Sharded(plan)
    try:
        with quiet():
            train(plan, rank, sharded, trace)
    except Exception:
        error = traceback.format_exc()
    if plan.divergence.what == "one more reduction":
        return Report(error, "")
    expected = reference(plan, sharded)[rank]
    return Report(error, first_wrong(trace, expected, TOLERANCES[plan.dtypes]))


def train(plan: Plan, rank: int, sharded: Sharded, trace: Trace) -> None:
    for number in range(plan.steps):
        step = Step(plan, number, rank, sharded, trace)
        step.run()
        step.end()
    trace.update(sharded.parameters("end"))


def reference(plan: Plan, sharded: Sharded) -> list[Trace]:
    """What plain data parallel records, rank by rank.

    Args:
        sharded: says which elements a rank updates.
    """
    copies = [Copy(plan) for _ in range(plan.ranks)]
    traces: list[Trace] = [{} for _ in copies]
    for number in range(plan.steps):
        steps = [
            Step(plan, number, rank, copy, trace)
            for rank, (copy, trace) in enumerate(zip(copies, traces, strict=True))
        ]
        with quiet():
            for step in steps:
                step.run()
        mean = {name: sum(c.grads[name] for c in copies) / plan.ranks for name in copies[0].grads}
        before = copies[plan.divergence.rank].values
        for step, copy in zip(steps, copies, strict=True):
            copy.grads = {name: grad.clone() for name, grad in mean.items()}
            step.end()
        if any(step.diverges("skips the optimizer") for step in steps):
            _take_back(plan, sharded, copies, before)
    for copy, trace in zip(copies, traces, strict=True):
        trace.update(copy.parameters("end"))
    return traces


def _take_back(plan: Plan, sharded: Sharded, copies: list[Copy], before: Numbers) -> None:
    """Undoes the step of the elements that the diverging rank should have updated, on all that share them."""
    row, shard = divmod(plan.divergence.rank, plan.shard_size)
    first = row * plan.shard_size
    for rank in range(first, first + plan.shard_size):
        values = {name: value.clone() for name, value in copies[rank].values.items()}
        for name, _, piece in sharded.pieces(shard):
            values[name].view(-1)[piece.start : piece.stop] = before[name].view(-1)[piece.start : piece.stop]
        copies[rank].load(values)


def first_wrong(trace: Trace, expected: Trace, tolerance: Tolerance) -> str:
    """The first recorded number that is not the expected one, of a training that may have ended early."""
    for (label, start, stop), found in trace.items():
        value = expected[Part(label)]
        if start != 0 or stop is not None:
            value = value.flatten()[start:stop]
        if not tolerance.accepts(found, value):
            return f"{label} is\n{found}\nplain data parallel has\n{value}"
    return ""
