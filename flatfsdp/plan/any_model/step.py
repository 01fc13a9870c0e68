"""A few steps of one rank, on the meta device.

In:   what a user trains with, as `plan_model` has it.
Out:  a `Traced`: what was allocated at the fullest moment, what was computed, what was sent.
Next: `plan.py` makes lines of it.

    first step     optimizer state appears, and the order of the units is learnt
    second step    the peak is looked for, operators are counted, the byte ledger runs
    third step     is the second one again; at its peak it is noted what is there

Of the microbatches between the first and the last one of a step, which do all the same, one is run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from flatfsdp.contract.any_model import Loss, layers_of, loss_of
from flatfsdp.engine.api.shard import shard
from flatfsdp.engine.api.wrap import WrapPolicy
from flatfsdp.engine.step.root import Root
from flatfsdp.engine.whole.memory import GroupSizes, MemoryReport, buffers_of, sizes_of
from flatfsdp.engine.whole.units import units_in
from flatfsdp.flat.nested import map_tensors
from flatfsdp.fp8 import Recipe, autocast
from flatfsdp.microbatch import microbatches
from flatfsdp.optim import AdamW
from flatfsdp.plan.any_model.gpu_functions import GPUFunctions
from flatfsdp.plan.any_model.live_memory import LiveMemory, allocated, key_of
from flatfsdp.plan.any_model.observer import OperatorObserver
from flatfsdp.plan.any_model.on_meta import META, move_to_meta
from flatfsdp.plan.any_model.places import BACKWARD, FORWARD, OPTIMIZER, StepPlace, StepPlaces
from flatfsdp.plan.any_model.work import Load, StepWork
from flatfsdp.plan.machine import Machine
from flatfsdp.torch_private import backward_within_modes


@dataclass(frozen=True)
class Training:
    """A rank's step to plan; attributes as the arguments of `plan_model`."""

    build_model: Callable[[], nn.Module]
    batches: Sequence[Any]
    policy: WrapPolicy | None
    loss: Loss | None
    build_optimizer: Callable[[Any], torch.optim.Optimizer] | None
    recipe: Recipe | None
    max_norm: float | None
    options: Mapping[str, Any]


@dataclass(frozen=True)
class Traced:
    """Memory, work and traffic of one step on the meta device.

    Attributes:
        names: of the units, the root's own, which is empty, first.
        parameters: elements of each unit, of all ranks together.
        report: `memory_report` between two steps.
        between_steps: bytes that are allocated then.
        peak: bytes that are allocated at most.
        at_peak: bytes by name of the buffer, or by the place that has allocated them.
        peak_in: where that was.
        loads: of one step.
        sent: bytes by kind of traffic, of one step: see `ByteLedger`.
    """

    names: tuple[str, ...]
    parameters: tuple[int, ...]
    sizes: Sequence[Sequence[GroupSizes]]
    report: MemoryReport
    between_steps: int
    peak: int
    at_peak: Mapping[str | StepPlace, int]
    peak_in: StepPlace
    loads: Mapping[StepPlace, Load]
    sent: Mapping[str, int]


def trace(training: Training, machine: Machine) -> Traced:
    """Runs the steps.

    Raises:
        NotImplementedError: for an operator that tensors without memory cannot have, such as one that reads
            a value.
        ValueError: as `shard`, and if the model returns no loss.
    """
    memory, work = LiveMemory(), StepWork(machine, training.recipe)
    observer = OperatorObserver(memory, work)
    with ExitStack() as stack:
        stack.enter_context(META)
        stack.enter_context(GPUFunctions())
        stack.enter_context(observer)
        return _Run(training, memory, work, observer).traced()


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    """FlatFSDP's; by default it would read whether gradients are finite."""
    return AdamW(parameters, nonfinite="skip")


def _without_repeats(batches: list[Any]) -> tuple[list[Any], list[int]]:
    """The batches that are run, and for how many each of them stands."""
    first, *middle, last = batches if len(batches) > 1 else [*batches, *batches]
    if len(middle) < 2 or any(_form(batch) != _form(middle[0]) for batch in middle):
        return batches, [1] * len(batches)
    return [first, middle[0], last], [1, len(middle), 1]


def _form(batch: Any) -> tuple[Any, ...]:
    """All of a batch but the values of its tensors."""
    leaves, structure = tree_flatten(batch)
    return structure, *(
        (leaf.shape, leaf.stride(), leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in leaves
    )


class _Run:
    def __init__(
        self, training: Training, memory: LiveMemory, work: StepWork, observer: OperatorObserver
    ) -> None:
        self._training = training
        self._memory = memory
        self._work = work
        built = training.build_model()
        move_to_meta(built)
        self._model: Any = shard(built, training.policy or layers_of(built), device=META, **training.options)
        del built
        build = training.build_optimizer or _adamw
        self._optimizer = build(self._model.parameters())
        # All of them, which take memory, although not all are run.
        self._given = [map_tensors(lambda tensor: tensor.to(META), batch) for batch in training.batches]
        self._batches, self._times = _without_repeats(self._given)
        units = {prefix.rstrip("."): unit for prefix, unit in units_in(self._model)}
        self._names = tuple(units)
        inner: dict[str, nn.Module] = {name: unit for name, unit in units.items() if name}
        self._places = observer.places = StepPlaces(inner)
        # Shards were cut from whole parameters: their memory is behind the buffers' tensors, which stay.
        groups = [group for unit in units.values() for group in unit.fsdp_state.groups]
        memory.watch(
            tensor
            for group in groups
            for name, tensor in buffers_of(group)
            if name in ("flat buffer", "transposed weights")
        )

    @property
    def _root(self) -> Root:
        root: Root = self._model.fsdp_state.root
        return root

    def traced(self) -> Traced:
        self._step()
        self._memory.begin()
        self._work.begin()
        ledger = self._model.fsdp_state.shared.ledger
        ledger.reset()
        between_steps = self._memory.live
        self._step()
        loads, sent, peak = self._work.by_place, dict(ledger.bytes), self._memory.peak
        at_peak: dict[str | StepPlace, int] = {}
        places: list[StepPlace] = []

        def look() -> None:
            at_peak.update(self._held())
            places.append(self._places.now)

        self._memory.begin(self._memory.peak_at, look)
        self._work.begin()
        self._step()
        groups = [unit.groups for unit in self._root.units]
        return Traced(
            names=self._names,
            parameters=tuple(sum(slot.numel for g in unit for slot in g.layout.slots) for unit in groups),
            sizes=sizes_of(self._root),
            report=self._model.memory_report(self._optimizer),
            between_steps=between_steps,
            peak=peak,
            at_peak=at_peak,
            peak_in=places[0],
            loads=loads,
            sent=sent,
        )

    def _step(self) -> None:
        model, optimizer, training = self._model, self._optimizer, self._training
        loss_of_batch = training.loss or loss_of
        with self._region():
            for batch, times in zip(microbatches(model, self._batches), self._times, strict=True):
                with self._standing_for(times):
                    with self._places.during(FORWARD):
                        loss = loss_of_batch(model, batch)
                    with self._places.during(BACKWARD):
                        backward_within_modes(loss)
                    del loss
        with self._places.during(OPTIMIZER):
            if training.max_norm is not None:
                model.clip_grad_norm_(training.max_norm)
            optimizer.step()
            optimizer.zero_grad()

    @contextmanager
    def _standing_for(self, times: int) -> Iterator[None]:
        """Context in which work and traffic count `times` times, for equal microbatches that are not run."""
        sent = self._model.fsdp_state.shared.ledger.bytes
        before, self._work.times = dict(sent), times
        yield
        self._work.times = 1
        for kind, nbytes in sent.items():
            sent[kind] = nbytes + (times - 1) * (nbytes - before.get(kind, 0))

    def _region(self) -> AbstractContextManager[object]:
        recipe = self._training.recipe
        return nullcontext() if recipe is None else autocast(recipe=recipe)

    def _held(self) -> dict[str | StepPlace, int]:
        """Bytes that are allocated now, by what they are for."""
        names = {key_of(tensor): name for name, tensor in self._named()}
        held: dict[str | StepPlace, int] = {}
        for allocation in self._memory.allocations():
            name = names.get(allocation.key, allocation.place)
            held[name] = held.get(name, 0) + allocation.nbytes
        for name, tensor in self._named():
            if name in ("flat buffer", "transposed weights"):
                held[name] = held.get(name, 0) + allocated(tensor.untyped_storage().nbytes())
        return held

    def _named(self) -> Iterator[tuple[str, Tensor]]:
        for group in self._root.groups:
            yield from buffers_of(group)
        for state in self._optimizer.state.values():
            for value in state.values():
                if isinstance(value, Tensor):
                    yield "optimizer state", value
        for buffer in self._model.buffers():
            yield "buffers of the model", buffer
