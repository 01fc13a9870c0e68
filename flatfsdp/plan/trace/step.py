"""Two steps of one rank, on the meta device.

In:   a `Training`: the part of a model that the rank has, and how it is trained.
Out:  a `Trace`: what is held at every moment, what is computed, what is sent.
Next: `layers.py` extends it to more layers; `memory.py` and `time.py` make lines of it.

    first step     one microbatch: optimizer state appears, and the order of the units is learnt
    second step    operators and allocations are counted, the byte ledger runs

The microbatches of the second step are its rounds: each may stand for several that are alike.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from flatfsdp.comm.parallelism import Parallelism
from flatfsdp.engine.api.shard import shard
from flatfsdp.engine.api.wrap import WrapPolicy, pick_units
from flatfsdp.engine.step.root import Root
from flatfsdp.engine.whole.memory import ALWAYS, GroupSizes, buffers_of, sizes_of
from flatfsdp.engine.whole.units import units_in
from flatfsdp.flat.nested import tensors_in
from flatfsdp.fp8 import Recipe, autocast
from flatfsdp.microbatch import microbatches
from flatfsdp.plan.machine import Machine
from flatfsdp.plan.trace.gpu_functions import gpu_functions
from flatfsdp.plan.trace.live_memory import LiveMemory
from flatfsdp.plan.trace.observer import OperatorObserver
from flatfsdp.plan.trace.on_meta import META
from flatfsdp.plan.trace.places import BACKWARD, FORWARD, OPTIMIZER, StepPlace, StepPlaces
from flatfsdp.plan.trace.ranks import Imagined
from flatfsdp.plan.trace.work import Load, StepWork

GATHERED = ("flat buffer", "transposed weights")
"""Buffers whose memory comes and goes behind tensors that stay."""
REST, GRADIENT = "everything else", "reduced gradient"


@dataclass(frozen=True)
class Training:
    """A rank's part of a model, and its step.

    Attributes:
        ranks: those that share the part; pipeline ranks do not matter here.
        build: builds the part, which is not sharded, given the tensor-parallel ranks.
        policy: which modules of it are units.
        batches: makes them, one a round.
        run: forward of (part, batch): the loss, or another result and its gradient.
        build_optimizer: of an iterable of parameters.
        recipe: of FP8 GEMMs.
        has_region: whether `fp8.autocast` with the recipe is around the step, and not in the model.
        max_norm: to which gradients are clipped; None leaves it out.
        checkpoint_units: whether units keep their inputs only, and run again in the backward.
        options: of `shard`, but for the ranks.
    """

    ranks: Parallelism
    build: Callable[[dist.ProcessGroup | None], nn.Module]
    policy: Callable[[nn.Module], WrapPolicy | None]
    batches: Callable[[], list[Any]]
    run: Callable[[nn.Module, Any], tuple[Tensor, Tensor | None]]
    build_optimizer: Callable[[Any], torch.optim.Optimizer]
    recipe: Recipe | None
    has_region: bool
    max_norm: float | None
    checkpoint_units: bool
    options: Mapping[str, Any]


class Moment(NamedTuple):
    """A part of a step: from one unit to the next.

    Attributes:
        unit: the unit that runs, or has run last.
        since: 0 while it runs; then how many parts ago it did.
    """

    round: int
    phase: str
    unit: str
    since: int


class UnitTrace(NamedTuple):
    """One unit; the root's name is empty.

    Attributes:
        parameters: elements, of all ranks together.
        sizes: of its groups' buffers.
        loads: work by round and phase.
        saved: bytes that its forwards have made, by moment.
    """

    name: str
    parameters: int
    sizes: Sequence[GroupSizes]
    loads: Mapping[tuple[int, str], Load]
    saved: Mapping[Moment, int]


@dataclass(frozen=True)
class Trace:
    """Memory, work and traffic of one rank's step; bytes.

    Attributes:
        units: the root first.
        static: what is there between steps, by buffer, without batches.
        given: the batch of each round.
        moments: what comes on top at the fullest moment of each part of the step, by use.
        waiting: the same for a microbatch between its forward and its backward, by round.
        sent: by kind of traffic, see `ByteLedger`, by round.
        optimizer: work of the optimizer's step.
    """

    units: tuple[UnitTrace, ...]
    static: Mapping[str, int]
    given: tuple[int, ...]
    moments: Mapping[Moment, Mapping[str, int]]
    waiting: tuple[Mapping[str, int], ...]
    sent: tuple[Mapping[str, int], ...]
    optimizer: Load


def trace(
    training: Training,
    model: nn.Module,
    imagined: Imagined,
    machine: Machine,
    rename: Callable[[str], str] = str,
) -> Trace:
    """Runs the steps of a part that was built on the meta device; it becomes sharded.

    Args:
        rename: the names of units in the trace, from those in the model.

    Raises:
        NotImplementedError: for an operator that tensors without memory cannot have, such as one that reads
            a value.
        ValueError: as `shard`, and if the model returns no loss.
    """
    memory, work = LiveMemory(), StepWork(machine, training.recipe, imagined.tp_group)
    observer = OperatorObserver(memory, work)
    with gpu_functions(), observer:
        return _Run(training, model, imagined, memory, work, observer, rename).traced()


class _Run:
    def __init__(
        self,
        training: Training,
        model: nn.Module,
        imagined: Imagined,
        memory: LiveMemory,
        work: StepWork,
        observer: OperatorObserver,
        rename: Callable[[str], str],
    ) -> None:
        self._training, self._memory, self._work = training, memory, work
        memory.see(list(model.buffers()), StepPlace("", "build"))
        policy = training.policy(model)
        if training.checkpoint_units and policy is not None:
            for module, places in pick_units(model, policy).items():
                for parent, name, _ in places:
                    setattr(parent, name, checkpoint_wrapper(module))
        options = {**training.options, **imagined._asdict(), "device": META}
        self._model: Any = shard(model, policy, **options)
        self._optimizer = training.build_optimizer(self._model.parameters())
        self._batches = training.batches()
        units = {rename(prefix.rstrip(".")): unit for prefix, unit in units_in(self._model)}
        self._names = tuple(units)
        inner: dict[str, nn.Module] = {name: unit for name, unit in units.items() if name}
        self._part = Moment(0, FORWARD, "", 0)
        self._places = observer.places = StepPlaces(inner, self._went)
        # Shards were cut from whole parameters: their memory is behind the buffers' tensors, which stay.
        groups = [group for unit in units.values() for group in unit.fsdp_state.groups]
        for label in GATHERED:
            found = (tensor for group in groups for name, tensor in buffers_of(group) if name == label)
            memory.watch(label, found)

    @property
    def _root(self) -> Root:
        root: Root = self._model.fsdp_state.root
        return root

    def traced(self) -> Trace:
        self._step(self._batches[:1])
        self._memory.begin()
        self._work.take()
        for number, batch in enumerate(self._batches):
            for tensor in tensors_in(batch):
                self._memory.name(tensor, f"given {number}")
        self._name_buffers()
        self._memory.note("between steps")
        loads, sent = self._step(self._batches)
        held = self._memory.fullest()
        between = held.pop("between steps")
        given = tuple(between[f"given {number}"] for number in range(len(self._batches)))
        static: Counter[str] = Counter()
        for row in self._model.memory_report(self._optimizer).rows:
            if row.lives == ALWAYS:
                static[f"{row.buffer}, {str(row.dtype).removeprefix('torch.')}"] += row.total
        static[REST] = between.total() - sum(static.values()) - sum(given)
        more = {part: _difference(each, between) for part, each in held.items()}
        moments = {moment: each for moment, each in more.items() if isinstance(moment, Moment)}
        groups = [unit.groups for unit in self._root.units]
        return Trace(
            units=tuple(
                UnitTrace(
                    name,
                    sum(slot.numel for group in of_unit for slot in group.layout.slots),
                    sizes,
                    {
                        (number, place.phase): load
                        for number, of_round in enumerate(loads)
                        for place, load in of_round.items()
                        if place.unit == name
                    },
                    {moment: each[StepPlace(name, FORWARD)] for moment, each in moments.items()},
                )
                for name, of_unit, sizes in zip(self._names, groups, sizes_of(self._root.units), strict=True)
            ),
            static=static,
            given=given,
            moments={moment: _by_use(each) for moment, each in moments.items()},
            waiting=tuple(_by_use(more["waiting", number]) for number in range(len(given))),
            sent=tuple(sent),
            optimizer=loads[-1].get(StepPlace("", OPTIMIZER), Load()),
        )

    def _step(self, batches: Sequence[Any]) -> tuple[list[dict[StepPlace, Load]], list[dict[str, int]]]:
        """Work of each round, and then of the optimizer, by place; traffic of each round, by kind."""
        model, optimizer, training = self._model, self._optimizer, self._training
        loads, sent = [], []
        with self._region():
            for number, batch in enumerate(microbatches(model, batches)):
                before = Counter(model.fsdp_state.shared.ledger.bytes)
                self._begin(number)
                with self._places.during(FORWARD):
                    out, gradient = training.run(model, batch)
                self._memory.note(("waiting", number))
                self._begin(number)
                with self._places.during(BACKWARD):
                    out.backward(gradient)
                del out, gradient
                loads.append(self._work.take())
                sent.append(dict(model.fsdp_state.shared.ledger.bytes - before))
        with self._places.during(OPTIMIZER):
            if training.max_norm is not None:
                model.clip_grad_norm_(training.max_norm)
            optimizer.step()
            optimizer.zero_grad()
        return [*loads, self._work.take()], sent

    def _region(self) -> AbstractContextManager[object]:
        return autocast(recipe=self._training.recipe) if self._training.has_region else nullcontext()

    # ---- moments ----------------------------------------------------------------------------------------

    def _begin(self, number: int) -> None:
        """Begins the forward or backward of a round."""
        self._part = Moment(number, "", "", 0)

    def _went(self) -> None:
        """Begins the next part of a step."""
        self._name_buffers()
        unit, phase = self._places.now
        before = self._part
        if unit:
            self._part = Moment(before.round, phase, unit, 0)
        else:
            self._part = Moment(before.round, phase, before.unit, before.since + 1)
        self._memory.part = self._part

    def _name_buffers(self) -> None:
        for tensor, label in self._named():
            self._memory.name(tensor, label)

    def _named(self) -> Iterator[tuple[Tensor, str]]:
        for group in self._root.groups if self._model.fsdp_state.is_used else ():
            yield from ((tensor, name) for name, tensor in buffers_of(group))
            if group.partial_grad.so_far is not None:
                yield group.partial_grad.so_far, GRADIENT


def _difference(held: Counter[Hashable], before: Counter[Hashable]) -> Counter[Hashable]:
    """What has come, or if negative gone."""
    found = Counter(held)
    found.subtract(before)
    return found


USES = {FORWARD: "activations", BACKWARD: "backward", OPTIMIZER: "optimizer"}


def _by_use(held: Mapping[Hashable, int]) -> dict[str, int]:
    found: Counter[str] = Counter()
    for label, nbytes in held.items():
        found[USES.get(label.phase, "other") if isinstance(label, StepPlace) else str(label)] += nbytes
    return dict(found)
