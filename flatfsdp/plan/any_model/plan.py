"""`plan_model`: what a training step of any model will take.

In:   a function that builds the model, the batches of one step, how many GPUs.
Out:  a `ModelPlan`: memory, traffic and time, by unit and together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from flatfsdp.comm.parallelism import Parallelism
from flatfsdp.contract.any_model import Loss
from flatfsdp.engine.api.wrap import WrapPolicy
from flatfsdp.engine.whole.memory import ALWAYS, GroupSizes
from flatfsdp.fp8 import Recipe
from flatfsdp.options import Precision
from flatfsdp.plan.any_model.places import BACKWARD, FORWARD, OPTIMIZER, StepPlace
from flatfsdp.plan.any_model.ranks import imagined_ranks
from flatfsdp.plan.any_model.step import Traced, Training, trace
from flatfsdp.plan.any_model.work import Load, total
from flatfsdp.plan.links import Group, Groups
from flatfsdp.plan.machine import Machine
from flatfsdp.plan.memory import Line, StepMemory
from flatfsdp.plan.time import HOST, LAST_REDUCTION, PARAMETERS, StepTime
from flatfsdp.plan.traffic import Sent, share


@dataclass(frozen=True)
class UnitPlan:
    """Memory and time of one unit; bytes and seconds of one rank.

    Attributes:
        name: empty for the root, which has all that is in no other unit.
        parameters: elements, of all ranks together.
        between_steps: bytes of its shards; not of the optimizer.
        gathered: bytes of its parameters while it computes, with transposed FP8 weights.
        saved: bytes that its forwards keep for backwards, at the fullest moment of the step.
        forward, backward: seconds of a GPU in one microbatch.
        gather, reduce: seconds of one gather of its parameters, and of the reduction of its gradients.
    """

    name: str
    parameters: int
    between_steps: int
    gathered: int
    saved: int
    forward: float
    backward: float
    gather: float
    reduce: float


@dataclass(frozen=True)
class ModelPlan:
    """Memory, traffic and time of one step, of one rank.

    Attributes:
        memory: at the fullest moment.
        sent: bytes that it sends in a step.
        units: the root first.
    """

    gpus: int
    microbatches: int
    machine: Machine
    memory: StepMemory
    sent: Sent
    time: StepTime
    units: tuple[UnitPlan, ...]

    @property
    def parameters(self) -> int:
        """Elements of the whole model."""
        return sum(unit.parameters for unit in self.units)

    @property
    def fits(self) -> bool:
        """Whether it needs less memory than the machine has."""
        return self.memory.peak <= self.machine.usable_memory()


def plan_model(
    build_model: Callable[[], nn.Module],
    batches: Sequence[Any],
    *,
    gpus: int,
    policy: WrapPolicy | None = None,
    loss: Loss | None = None,
    build_optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
    recipe: Recipe | None = None,
    max_norm: float | None = 1.0,
    machine: Machine | None = None,
    **options: Any,
) -> ModelPlan:
    """Plans a training step of any model on so many GPUs, without one.

        plan = plan_model(lambda: GPT2LMHeadModel(config), [batch] * 8, gpus=4, precision=precision)
        print(plan.memory.peak / 2**30, plan.time.seconds)

    The engine's own step runs on the meta device, where tensors have shapes and no memory: what it allocates
    is counted as a GPU would, every operator takes its operations or bytes over the rates of the machine, and
    what is sent is what the byte ledger says.  Attention is taken to be a fused kernel.  Conditions on values
    are those of a plain batch: `all` is True, and `any` is False.

    Args:
        build_model: builds the model, which is not sharded.  It is called with the meta device as the default
            one, so that large models need no memory.
        batches: the microbatches of one step, of one rank: as for `flatfsdp.parity.verify`.  Their values are
            not read, so tensors of any device will do.
        gpus: over which parameters are sharded, all of them together.
        policy: which modules are units; None takes the items of the outermost lists of modules.
        loss: of (model, batch); None takes what the model returns.
        build_optimizer: of an iterable of parameters; None takes `flatfsdp.optim.AdamW`.
        recipe: of `fp8.autocast` around the step; None leaves it out.
        max_norm: to which gradients are clipped; None leaves it out.
        machine: None for hosts of eight H200s.
        options: of `flatfsdp.shard`: precision, reshard_after_forward, prefetch and others.

    Raises:
        NotImplementedError: for an operator that needs values, naming it.
        RuntimeError: if the process has a process group.
        ValueError: if there is no batch or GPU; for `device` and `cpu_offload`, which are not planned; as
            `shard`; if the model returns no loss.
    """
    if not batches:
        raise ValueError("there is no batch; a plan needs the microbatches of one step")
    if not isinstance(gpus, int) or gpus < 1:
        raise ValueError(f"gpus is {gpus!r}; it must be a whole number of at least 1")
    for name in ("device", "cpu_offload"):
        if options.get(name):
            raise ValueError(f"a plan is of a step with everything on GPUs; leave {name} out")
    machine = machine or Machine()
    training = Training(build_model, batches, policy, loss, build_optimizer, recipe, max_norm, options)
    with imagined_ranks(gpus):
        traced = trace(training, machine)
    link = Groups.of(Parallelism.over(gpus), machine).dp_shard
    precision = options.get("precision") or Precision()
    units = tuple(_units(traced, len(batches), link, precision))
    return ModelPlan(
        gpus=gpus,
        microbatches=len(batches),
        machine=machine,
        memory=StepMemory(_static(traced, machine), _passing(traced), _moment(traced.peak_in)),
        sent=Sent(*(traced.sent.get(kind, 0) for kind in ("gather", "reduce", "all_reduce"))),
        time=_time(traced, units, len(batches), machine, options.get("reshard_after_forward", True)),
        units=units,
    )


SHOWN = 2**20
"""Bytes of the smallest line."""


# ---- memory -----------------------------------------------------------------------------------------------


def _static(traced: Traced, machine: Machine) -> tuple[Line, ...]:
    rows = [row for row in traced.report.rows if row.lives == ALWAYS]
    lines = [Line(f"{row.buffer}, {str(row.dtype).removeprefix('torch.')}", row.total) for row in rows]
    rest = traced.between_steps - sum(line.nbytes for line in lines)
    return (
        *lines,
        Line("everything else", rest, "buffers of the model, batches, scales"),
        Line("cuBLAS workspaces", machine.workspaces, "one a thread"),
    )


def _passing(traced: Traced) -> tuple[Line, ...]:
    held = traced.at_peak
    named = {name: nbytes for name, nbytes in held.items() if isinstance(name, str)}
    by_phase = {
        phase: sum(n for place, n in held.items() if isinstance(place, StepPlace) and place.phase == phase)
        for phase in (FORWARD, BACKWARD, OPTIMIZER)
    }
    lines = [
        Line("flat buffer", named.get("flat buffer", 0), "gathered parameters"),
        Line("transposed weights", named.get("transposed weights", 0), "FP8, for the backward"),
        Line("main_grad", named.get("main_grad", 0), "unsharded, until it is reduced"),
        Line("reduced gradient", named.get("reduced gradient", 0), "until zero_grad"),
        Line("activations", by_phase[FORWARD], "that forwards have made"),
        Line("backward", by_phase[BACKWARD], "what it needs beside, gradients on their way"),
        Line("optimizer", by_phase[OPTIMIZER], "what a step needs beside"),
    ]
    missing = traced.peak - traced.between_steps - sum(line.nbytes for line in lines)
    return tuple(line for line in (*lines, Line("other", missing)) if abs(line.nbytes) >= SHOWN)


def _moment(place: StepPlace) -> str:
    where = f" of {place.unit}" if place.unit else ""
    return "the optimizer's step" if place.phase == OPTIMIZER else f"the {place.phase}{where}"


# ---- units ------------------------------------------------------------------------------------------------


def _units(traced: Traced, microbatches: int, link: Group, precision: Precision) -> list[UnitPlan]:
    plans = []
    for name, parameters, groups in zip(traced.names, traced.parameters, traced.sizes, strict=True):
        flat = _nbytes(groups, "flat buffer")
        numel = sum(sizes["main_grad"].numel for sizes in groups if "main_grad" in sizes)
        reduced = share(numel * precision.reduce.itemsize, link.size)
        plans.append(
            UnitPlan(
                name=name,
                parameters=parameters,
                between_steps=_nbytes(groups, "master shard") + _nbytes(groups, "compute shard"),
                gathered=flat + _nbytes(groups, "transposed weights"),
                saved=traced.at_peak.get(StepPlace(name, FORWARD), 0),
                forward=total(traced.loads, [FORWARD], name).seconds / microbatches,
                backward=total(traced.loads, [BACKWARD], name).seconds / microbatches,
                gather=link.seconds(share(flat, link.size)),
                # Unsharded parameters have gradients that all ranks add up.
                reduce=link.seconds(reduced if flat else 2 * reduced),
            )
        )
    return plans


def _nbytes(groups: Sequence[GroupSizes], buffer: str) -> int:
    return sum(sizes[buffer].nbytes for sizes in groups if buffer in sizes)


# ---- time -------------------------------------------------------------------------------------------------


def _time(
    traced: Traced, units: Sequence[UnitPlan], microbatches: int, machine: Machine, reshard: bool
) -> StepTime:
    """The time of a step with the overlaps of `plan/time.py`, for units that may differ.

    A unit's gather runs beside the unit before, its reduction beside the next unit of the last backward.
    """
    loads = traced.loads
    passes, step = total(loads, [FORWARD, BACKWARD]), total(loads, [OPTIMIZER])
    root, *inner = units
    first = root.gather + (inner[0].gather if inner else 0.0)
    first += sum(max(0.0, b.gather - a.forward) for a, b in pairwise(inner))
    again = sum(max(0.0, a.gather - b.backward) for a, b in pairwise(inner))
    last = sum(
        max(0.0, b.reduce - max(0.0, a.backward - (a.gather if reshard else 0.0))) for a, b in pairwise(inner)
    )
    parameters = (microbatches * (first + again) if reshard else first) + last
    gathers = (
        (microbatches * (root.gather + 2 * sum(u.gather for u in inner)))
        if reshard
        else sum(u.gather for u in units)
    )
    busy = passes.seconds + parameters
    lines = {
        "gemms": passes.gemms,
        "attention": passes.attention,
        "memory-bound": passes.memory,
        PARAMETERS: parameters,
        LAST_REDUCTION: root.reduce + (inner[0].reduce if inner else 0.0),
        "optimizer": step.seconds,
        HOST: max(0.0, _host(passes, machine) - busy),
    }
    return StepTime(
        lines={name: seconds for name, seconds in lines.items() if seconds},
        communication=gathers + sum(unit.reduce for unit in units),
        flops=passes.flops,
    )


def _host(load: Load, machine: Machine) -> float:
    """Seconds that the host needs to start all of it."""
    return 1e-6 * (machine.host_us_operator * load.operators + machine.host_us_kernel * load.kernels)
