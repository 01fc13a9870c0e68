"""One plan of the stress test on one rank: trained three times, and compared.

In:   a `Plan` (`plans.py`), whose model `models.py` builds.
Out:  a `Verdict`.
Next: `search.py` judges many plans.
"""

from __future__ import annotations

import copy
import logging
import traceback
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from flatfsdp import Debug, Precision, Prefetch, microbatches, shard
from flatfsdp.engine.storage.shard_grad import plain
from tests.support.meshes import replicating
from tests.support.ranks import cached_in_file
from tests.support.stress.models import BATCH, VOCAB, Call, Model, PlannedError, hidden_of
from tests.support.stress.plans import Dtypes, FailWhere, Interlude, Plan, Schedule, Step

Trace = dict[str, Tensor]
"""What a training produced, by label: "step 0 loss 1", "end state body.parts.0.stock.weight", ..."""

PRECISIONS: dict[Dtypes, Precision] = {
    "fp64": Precision(torch.float64, torch.float64, torch.float64, torch.float64),
    "fp32": Precision(),
    "bf16": Precision(compute=torch.bfloat16),
    "bf16, reduced in bf16": Precision(compute=torch.bfloat16, reduce=torch.bfloat16),
}


@dataclass(frozen=True)
class Tolerance:
    """|a - b| <= relative * |b| + absolute, in Frobenius norms.

    The absolute part is what rounding leaves where large numbers cancel: a sum of gradients near zero, a
    small update of a large parameter.
    """

    relative: float
    absolute: float

    def accepts(self, found: Tensor, expected: Tensor) -> bool:
        error = (found.double() - expected.double()).norm()
        return bool(error <= self.relative * expected.double().norm() + self.absolute)


TOLERANCES: dict[Dtypes, Tolerance] = {"fp64": Tolerance(1e-10, 1e-13), "fp32": Tolerance(1e-6, 1e-6)}
"""Against the plain model; lower precision is compared between flag off and on only."""


# ---- one step -------------------------------------------------------------------------------------------


@dataclass
class Attempt:
    """One pass of one model over the microbatches of one step, on the data of one rank.

    Attributes:
        label: of what it records.
        fails: whether the step's planned failure happens in this attempt.
    """

    plan: Plan
    number: int
    model: Any
    rank: int
    trace: Trace
    label: str
    fails: bool
    _losses: dict[int, Tensor] = field(default_factory=dict)
    _moment: int = 0

    @property
    def step(self) -> Step:
        return self.plan.steps[self.number]

    @property
    def count(self) -> int:
        return self.step.microbatches

    def run(self) -> bool:
        """Returns whether it raised the planned failure."""
        try:
            SCHEDULES[self.step.schedule](self)
        except PlannedError:
            return True
        return False

    def recover(self) -> None:
        """After a failure and `optimizer.zero_grad()`."""
        failure = self.step.failure
        # No engine can see this failure, and there is no loop that would begin anew.
        if failure and failure.where == "after backward" and self.step.schedule != "loop":
            self.model.zero_grad()

    def _failing(self, index: int) -> FailWhere | None:
        """The place at which this microbatch fails."""
        failure = self.step.failure
        return failure.where if self.fails and failure and failure.microbatch == index else None

    def forward(self, index: int) -> None:
        loss = self._loss(index, self._failing(index))
        self.trace[f"{self.label} loss {index}"] = loss.detach()
        self._losses[index] = loss
        self._interludes()

    def backward(self, index: int) -> None:
        self._losses.pop(index).backward()
        self._interludes()
        if self._failing(index) == "after backward":
            raise PlannedError

    def _loss(self, index: int, failing: FailWhere | None = None) -> Tensor:
        plan = self.plan
        generator = torch.Generator().manual_seed(
            ((plan.seed * 10 + self.number) * 10 + self.rank) * 10 + index
        )
        dtype = PRECISIONS[plan.dtypes].param
        hidden = torch.randn(BATCH, plan.width, generator=generator).to(dtype)
        tokens = torch.randint(0, VOCAB, (BATCH,), generator=generator)
        target = torch.rand(BATCH, 1, generator=generator).to(dtype)
        return hidden_of(self.model(hidden, call=Call(tokens, target, self.rank, index, failing)))

    def _interludes(self) -> None:
        for moment, what in self.step.interludes:
            if moment == self._moment:
                self._interlude(what, f"{self.label} moment {moment}")
        self._moment += 1

    def _interlude(self, what: Interlude, label: str) -> None:
        if what == "state dict":
            record_state(self.trace, label, self.model)
        elif what == "failing evaluation":
            with torch.no_grad(), suppress(PlannedError):
                self._loss(0, failing="forward")
        else:
            context = torch.no_grad() if what == "evaluate" else torch.inference_mode()
            with context:
                self.trace[f"{label} loss"] = self._loss(0).clone()


def loop(attempt: Attempt) -> None:
    for index in microbatches(attempt.model, range(attempt.count)):
        attempt.forward(index)
        attempt.backward(index)


def forwards_first(attempt: Attempt) -> None:
    for index in range(attempt.count):
        attempt.forward(index)
    for index in range(attempt.count):
        attempt.model.set_is_last_backward(index == attempt.count - 1)
        attempt.backward(index)


def last_forward_first(attempt: Attempt) -> None:
    for index in range(attempt.count):
        attempt.forward(index)
    for index in reversed(range(attempt.count)):
        attempt.model.set_is_last_backward(index == 0)
        attempt.backward(index)


def one_forward_ahead(attempt: Attempt) -> None:
    attempt.forward(0)
    for index in range(attempt.count):
        if index + 1 < attempt.count:
            attempt.forward(index + 1)
        attempt.model.set_is_last_backward(index == attempt.count - 1)
        attempt.backward(index)


def with_no_sync(attempt: Attempt) -> None:
    last = attempt.count - 1
    with attempt.model.no_sync():
        for index in range(last):
            attempt.forward(index)
            attempt.backward(index)
    attempt.forward(last)
    attempt.backward(last)


def forwards_under_no_sync(attempt: Attempt) -> None:
    last = attempt.count - 1
    with attempt.model.no_sync():
        for index in range(attempt.count):
            attempt.forward(index)
        for index in range(last):
            attempt.backward(index)
    attempt.backward(last)


def every_backward_reduces(attempt: Attempt) -> None:
    for index in range(attempt.count):
        attempt.forward(index)
        attempt.backward(index)


SCHEDULES: dict[Schedule, Callable[[Attempt], None]] = {
    "loop": loop,
    "forwards first": forwards_first,
    "last forward first": last_forward_first,
    "one forward ahead": one_forward_ahead,
    "no_sync": with_no_sync,
    "forwards under no_sync": forwards_under_no_sync,
    "every backward reduces": every_backward_reduces,
}


# ---- one training ---------------------------------------------------------------------------------------


@dataclass
class Members:
    """What is trained: one FlatFSDP, or the plain model's replicas, which share their parameters.

    Attributes:
        models: by the rank on whose data each of them runs.
        parameters: for the optimizer.
        settle: called after the backwards of a step: parameters have the gradients of all ranks.
        clip: as `clip_grad_norm_`.
    """

    models: dict[int, Any]
    parameters: list[nn.Parameter]
    settle: Callable[[], None]
    clip: Callable[[float], Tensor]


def sharded(plan: Plan, rank: int, flag: bool) -> Members:
    model = wrap(build(plan), plan, flag)
    return Members({rank: model}, list(model.parameters()), lambda: None, model.clip_grad_norm_)


def wrap(plain: nn.Module, plan: Any, flag: bool) -> Any:
    """Each module of the plan's units, and the whole, sharded as the plan says."""
    options = {
        "mesh": {"hybrid": _hybrid_mesh, "replicate": replicating}.get(plan.sharding, lambda: None)(),
        "precision": PRECISIONS[plan.dtypes],
        "reshard_after_forward": plan.reshard_after_forward,
        "optimize_backward_concat": flag,
        "grad_sync": "every" if plan.every else "last",
        "prefetch": Prefetch(plan.prefetch_forward, plan.prefetch_backward),
        "debug": Debug(poison_on_free=plan.poison),
    }
    if not any(map(_is_unit, plain.modules())):
        return shard(plain, **options)
    return shard(plain, lambda name, module, numel: _is_unit(module), **options)


@cached_in_file
def _hybrid_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def _is_unit(module: nn.Module) -> bool:
    return getattr(module, "is_unit", False)


def unsharded(plan: Plan) -> Members:
    model = build(plan)
    parameters = [p for p in model.parameters() if p.requires_grad]
    shared = {id(p): p for p in model.parameters()}
    replicas = {rank: copy.deepcopy(model, dict(shared)) for rank in range(plan.ranks)}

    def settle() -> None:
        """The mean over the ranks."""
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad /= plan.ranks

    def clip(max_norm: float) -> Tensor:
        return nn.utils.clip_grad_norm_(parameters, max_norm)

    return Members(replicas, parameters, settle, clip)


def build(plan: Plan) -> Model:
    torch.manual_seed(plan.seed)
    return Model(plan).to(PRECISIONS[plan.dtypes].param)


def train(plan: Plan, members: Members) -> dict[int, Trace]:
    """Returns each rank's trace."""
    optimizer = _optimizer(plan, members.parameters)
    traces: dict[int, Trace] = defaultdict(dict)
    for number, step in enumerate(plan.steps):
        for fails in (True, False) if step.failure else (False,):
            label = f"step {number}" + (", failing," if fails else "")
            attempts = [
                Attempt(plan, number, model, rank, traces[rank], label, fails)
                for rank, model in members.models.items()
            ]
            failures = [attempt.run() for attempt in attempts]
            if not any(failures):
                break
            optimizer.zero_grad()
            for attempt in attempts:
                attempt.recover()
        members.settle()
        results = _gradients(f"step {number} gradient", members.parameters)
        if plan.clip:
            results[f"step {number} norm"] = members.clip(0.1)
        for trace in traces.values():
            trace.update(results)
        optimizer.step()
        optimizer.zero_grad()
        if step.reload:
            _halve(list(members.models.values()))
    for rank, model in members.models.items():
        record_state(traces[rank], "end", model)
        _record_optimizer(traces[rank], optimizer)
    return traces


def _optimizer(plan: Plan, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Does not blow up rounding errors: small steps, and a large epsilon for gradients near zero."""
    if plan.adam:
        return torch.optim.AdamW(parameters, lr=0.05, eps=0.1)
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def _halve(models: list[nn.Module]) -> None:
    """Loads half of what their state dicts say."""
    halves = [{name: value / 2 for name, value in model.state_dict().items()} for model in models]
    for model, half in zip(models, halves, strict=True):
        model.load_state_dict(half)


def record_state(trace: Trace, when: str, model: nn.Module) -> None:
    trace.update((f"{when} state {name}", value.clone()) for name, value in model.state_dict().items())


def _gradients(label: str, parameters: list[nn.Parameter]) -> Trace:
    grads = (parameter.grad for parameter in parameters)
    return {f"{label} {index}": plain(grad).clone() for index, grad in enumerate(grads) if grad is not None}


def _record_optimizer(trace: Trace, optimizer: torch.optim.Optimizer) -> None:
    for index, state in enumerate(optimizer.state.values()):
        trace.update((f"optimizer {index} {key}", value) for key, value in state.items())


# ---- one plan -------------------------------------------------------------------------------------------


class Verdict(NamedTuple):
    """On one rank.

    Attributes:
        problem: what is wrong; empty if nothing is.
        broken_off_by: name of the exception that ended the run early; empty if none did.
    """

    problem: str
    broken_off_by: str = ""


def check_on_rank(rank: int, world_size: int, plan: Plan) -> Verdict:
    """Trains the plan three times.  Returns exceptions, too, so that the pool of ranks lives on."""
    try:
        with quiet():
            return Verdict(_check(rank, plan))
    except Exception as error:
        return Verdict(traceback.format_exc(), type(error).__name__)


def _check(rank: int, plan: Plan) -> str:
    off, on = (train(plan, sharded(plan, rank, flag))[rank] for flag in (False, True))
    difference = first_difference(on, off)
    if difference:
        return f"flag on is not flag off: {difference}"
    if plan.dtypes not in TOLERANCES:
        return ""
    plain = train(plan, unsharded(plan))[rank]
    return first_deviation(on, plain, build(plan).state_dict(), TOLERANCES[plan.dtypes])


def first_difference(found: Trace, expected: Trace) -> str:
    """The first label whose tensors are not the same bit for bit; empty if all are."""
    if list(found) != list(expected):
        return f"recorded {list(found)}, expected {list(expected)}"
    for label, value in expected.items():
        if not torch.equal(found[label], value):
            return f"{label} is\n{found[label]}\nexpected\n{value}"
    return ""


def first_deviation(found: Trace, plain: Trace, start: dict[str, Tensor], tolerance: Tolerance) -> str:
    """The first loss, norm, or update of a parameter or buffer, that is not the plain model's."""
    ours, expected = ({k: v for k, v in t.items() if not _is_flat(k)} for t in (found, plain))
    if list(ours) != list(expected):
        return f"recorded {list(ours)}, the plain model {list(expected)}"
    for label, value in expected.items():
        _, _, name = label.partition(" state ")
        origin = start.get(name, torch.zeros_like(value))
        if not tolerance.accepts(ours[label] - origin, value - origin):
            return f"{label} is\n{ours[label]}\nthe plain model has\n{value}"
    return ""


def _is_flat(label: str) -> bool:
    """Whether this is about flat shards, which the plain model does not have."""
    return " gradient " in label or label.startswith("optimizer ")


@contextmanager
def quiet() -> Iterator[None]:
    """Without the warnings that a planned failure, or a checkpoint of nothing that trains, is good for."""
    logger = logging.getLogger("flatfsdp")
    before = logger.level
    logger.setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            logger.setLevel(before)
