"""The parts of a job, traced: each kind of pipeline stage once.

In:   a `Job` and a `Machine`.
Out:  `Stage`s of each pipeline rank.
Next: `memory.py`, `time.py` and `plan.py` make lines of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from flatfsdp.contract.any_model import layers_of, loss_of
from flatfsdp.engine.api.wrap import by_class
from flatfsdp.flat.nested import map_tensors
from flatfsdp.layers import TransformerLayer
from flatfsdp.models import LlamaConfig
from flatfsdp.models.llama import Llama
from flatfsdp.optim import AdamW
from flatfsdp.plan.job import Job, Model, Part
from flatfsdp.plan.machine import Machine
from flatfsdp.plan.trace.layers import Layered, Run, most_traced, trace_layers
from flatfsdp.plan.trace.on_meta import META
from flatfsdp.plan.trace.places import BACKWARD, FORWARD
from flatfsdp.plan.trace.step import Trace, Training, UnitTrace
from flatfsdp.plan.trace.work import Load, total


@dataclass(frozen=True)
class Stage:
    """A pipeline stage, or all of a model.

    Attributes:
        times: how many microbatches each round of the trace stands for.
    """

    part: Part
    trace: Trace
    times: tuple[int, ...]

    def load(self, phase: str, unit: UnitTrace | None = None) -> Load:
        """Work of a phase in a step, of one unit or of all."""
        units = self.trace.units if unit is None else [unit]
        # Layers may be one object, many times.
        counts = Counter(map(id, units))
        return total(
            each.loads[number, phase].times(times * counts[id(each)])
            for each in {id(each): each for each in units}.values()
            for number, times in enumerate(self.times)
            if (number, phase) in each.loads
        )

    @property
    def passes(self) -> Load:
        """Work of all forwards and backwards in a step."""
        return total([self.load(FORWARD), self.load(BACKWARD)])

    def name_of(self, unit: str) -> str:
        """The name that a unit has in the whole model."""
        if not self.part.layers or not unit:
            return unit
        traced = Run("layers", 0 if self.part.has_embedding else 1, 0)
        return traced.renamed(unit, self.part.layers.start + traced.position(unit))

    def sent(self, kind: str) -> int:
        """Bytes that a rank sends in a step, by the engine's ledger."""
        return sum(
            times * sent.get(kind, 0) for times, sent in zip(self.times, self.trace.sent, strict=False)
        )


class Tracer:
    """Traces each kind of stage once, for any number of jobs."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._found: dict[tuple[Any, ...], Layered] = {}
        self._jobs: dict[Job, list[list[Stage]]] = {}

    def stages(self, job: Job) -> list[list[Stage]]:
        """The stages of each pipeline rank.

        Raises:
            NotImplementedError: for an operator that needs values, naming it.
            RuntimeError: if the process has a process group.
            ValueError: as `shard`; if sizes do not divide evenly over ranks, or do not suit FP8; if the model
                returns no loss.
        """
        if job not in self._jobs:
            job.require_sizes()
            self._jobs[job] = [[self.stage(job, part) for part in parts] for parts in job.parts]
        return self._jobs[job]

    def stage(self, job: Job, part: Part) -> Stage:
        """One stage; arguments and errors are those of `stages`."""
        rounds, times = rounds_of(job)
        # Where the layers stand does not matter, nor what a pipeline does elsewhere.
        begin = 0 if part.has_embedding else 1
        here = part._replace(layers=range(begin, begin + len(part.layers)))
        # Any number of replicas is two: only what they send differs, see `time.sent_by`.
        ranks = replace(job.ranks, pp=1, dp_replicate=min(job.ranks.dp_replicate, 2))
        alone = replace(job, ranks=ranks, microbatches=len(times), schedule="1f1b")
        # Of many layers only a few are traced, whatever their number.
        key = (alone, here[1:], min(len(here.layers), most_traced(job.prefetch) + 1))
        if key not in self._found:
            self._found[key] = trace_layers(_training(alone, here, rounds), self._machine)
        counts = {"layers": len(here.layers)} if here.layers else {}
        return Stage(part, self._found[key].whole(counts), times)


def rounds_of(job: Job) -> tuple[list[Any], tuple[int, ...]]:
    """The microbatches that are run, and for how many each of them stands: those in the middle are alike."""
    if not isinstance(job.model, Model):
        count = job.microbatches
        return [], (1, count - 2, 1) if count > 2 else (1,) * count
    first, *middle = job.model.batches
    *middle, last = middle or [first]
    if len(middle) < 2 or any(_form(batch) != _form(middle[0]) for batch in middle):
        return list(job.model.batches), (1,) * len(job.model.batches)
    return [first, middle[0], last], (1, len(middle), 1)


def _form(batch: Any) -> tuple[Any, ...]:
    """All of a batch but the values of its tensors."""
    leaves, structure = tree_flatten(batch)
    return structure, *(
        (leaf.shape, leaf.stride(), leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in leaves
    )


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    """FlatFSDP's; by default it would read whether gradients are finite."""
    return AdamW(parameters, nonfinite="skip")


def _training(job: Job, part: Part, rounds: list[Any]) -> Training:
    options: dict[str, Any] = {
        "precision": job.precision if isinstance(job.model, Model) else job.dtypes,
        "reshard_after_forward": job.reshard_after_forward,
        "prefetch": job.prefetch,
        "grad_sync": job.grad_sync,
    }
    common: dict[str, Any] = {
        "ranks": job.ranks,
        "recipe": job.recipe,
        "checkpoint_units": job.checkpoint_layers,
    }
    if isinstance(job.model, Model):
        model = job.model
        return Training(
            **common,
            build=lambda _: model.build(),
            policy=lambda built: model.policy or layers_of(built),
            batches=partial(_on_meta, rounds),
            run=lambda built, batch: ((model.loss or loss_of)(built, batch), None),
            build_optimizer=model.build_optimizer or _adamw,
            has_region=job.recipe is not None,
            max_norm=model.max_norm,
            options={**options, **model.options},
        )
    return Training(
        **common,
        build=partial(_llama, job, job.model, part),
        policy=lambda _: by_class(TransformerLayer),
        batches=partial(_llama_batches, job, job.model, part),
        run=partial(_run_llama, part),
        build_optimizer=_adamw,
        has_region=False,
        max_norm=1.0,
        options=options,
    )


def _on_meta(batches: Sequence[Any]) -> list[Any]:
    return [map_tensors(lambda tensor: tensor.to(META), batch) for batch in batches]


# ---- a stage of a Llama ---------------------------------------------------------------------------------


def _llama(job: Job, config: LlamaConfig, part: Part, tp_group: dist.ProcessGroup | None) -> nn.Module:
    return Llama(
        replace(config, layers=part.layers.stop + (not part.has_head)),
        part.layers,
        tp_group=tp_group,
        sequence_parallel=job.ranks.sequence_parallel,
        fuse_wgrad_accumulation=job.fuse_wgrad_accumulation,
        recipe=job.recipe,
        device=META,
    )


def _llama_batches(job: Job, config: LlamaConfig, part: Part) -> list[tuple[Tensor, Tensor]]:
    """What comes in, and targets or the gradient of what goes out."""
    length = config.seq // job.ranks.sequence_ranks

    def tokens() -> Tensor:
        return torch.empty(job.batch, config.seq, dtype=torch.int64, device=META)

    def between() -> Tensor:
        return torch.empty(length, job.batch, config.hidden, dtype=job.dtypes.compute, device=META)

    return [
        (tokens() if part.has_embedding else between(), tokens() if part.has_head else between())
        for _ in range(job.microbatches)
    ]


def _run_llama(part: Part, model: Any, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor | None]:
    inputs, other = batch
    if part.has_embedding and part.has_head:
        return model(inputs, other), None
    # What is received gets a gradient, which is sent back.
    received = inputs if part.has_embedding else inputs.detach().requires_grad_()
    out: Tensor = model(received)
    return (model.loss(out, other), None) if part.has_head else (out, other)
