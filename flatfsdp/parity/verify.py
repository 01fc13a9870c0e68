"""`verify`: checks for a user's own model that switches change no bit.

In:   functions that build a model and yield batches.
Out:  a `Parity` with one row a switch, the same on every rank.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from flatfsdp.comm.device import indexed
from flatfsdp.comm.launch import Rank
from flatfsdp.contract.any_model import Batches, BuildModel, Loss
from flatfsdp.engine.api.wrap import WrapPolicy
from flatfsdp.fp8 import Recipe
from flatfsdp.options import Precision, default_precision
from flatfsdp.parity.any_model import ModelJob, fusing
from flatfsdp.parity.evidence import (
    KINDS,
    GradientRecorder,
    NamedTensors,
    differences_on_all_ranks,
    evidence,
)
from flatfsdp.parity.loop import MakeTrainee, OnStep, RunSummary, ignore, train
from flatfsdp.parity.switches import Sharding, Switch
from flatfsdp.profiling.step_time import to_json


@dataclass(frozen=True)
class Comparison:
    """Comparison of two runs of a model, with a switch off and on.

    Attributes:
        switch: what differs between the runs.
        ends: names of the two runs.
        differences: for each kind of evidence, the first difference on each rank that has one: the step, the
            unit, and the element of a parameter.
        about: what distinguishes the row from others besides the switch: its `name`, and further facts.
        same_as_one_rank: whether the second run has the bits of the first, which had one rank; None if it had
            as many ranks as the second.
    """

    switch: str
    ends: tuple[str, str]
    off: RunSummary
    on: RunSummary
    differences: dict[str, list[str]]
    about: dict[str, Any] = field(default_factory=dict)
    same_as_one_rank: bool | None = None

    @property
    def name(self) -> str:
        """The row in words."""
        return ", ".join(filter(None, (self.about.get("name"), " / ".join(self.ends))))

    @property
    def equal(self) -> bool:
        """Whether all bits are equal."""
        return not any(self.differences.values())

    def lines(self) -> list[str]:
        """Describes the differences, by kind of evidence and rank."""
        return [
            f"{self.name}, {kind}: first difference on {place}"
            for kind, places in self.differences.items()
            for place in places
        ]

    def described(self) -> dict[str, Any]:
        """The row's entry in JSON."""
        row = asdict(self)
        return {**row.pop("about"), **row, "equal": self.equal, "falling": self.on.falling}


@dataclass(frozen=True)
class Parity:
    """Result of `verify`.

    Attributes:
        left_out: switches that make no difference to the model, each with the reason.
        about: facts about the runs, for the JSON.
    """

    rows: list[Comparison]
    left_out: dict[str, str]
    about: dict[str, Any]

    @property
    def equal(self) -> bool:
        """Whether no switch has changed a bit."""
        return all(row.equal for row in self.rows)

    def differences(self) -> list[str]:
        """One line for each difference."""
        return [line for row in self.rows for line in row.lines()]

    def require(self) -> None:
        """Raises AssertionError, with all differences, unless everything is equal."""
        if not self.equal:
            raise AssertionError("\n".join(self.differences()))

    def json(self) -> str:
        """The result as JSON."""
        rows = [row.described() for row in self.rows]
        return to_json({"equal": self.equal, **self.about, "rows": rows, "left_out": self.left_out}, indent=2)

    def __str__(self) -> str:
        equal = f"equal {', '.join(KINDS)}"
        return "\n".join("\n".join(row.lines()) or f"{row.name}: {equal}" for row in self.rows)


def verify(
    build_model: BuildModel,
    batches: Batches,
    *,
    switches: Iterable[Switch | str] | None = None,
    precision: Precision | None = None,
    recipe: Recipe | None = None,
    policy: WrapPolicy | None = None,
    loss: Loss | None = None,
    steps: int = 4,
    microbatches: int = 2,
    lr: float = 1e-3,
    max_norm: float = 1.0,
    seed: int = 0,
    device: torch.device | str | None = None,
    self_test: bool = False,
) -> Parity:
    """Trains a model with each switch off and on, and compares all bits.

        parity = verify(build_model, batches, switches=["flag", "reshard"])
        parity.require()

    Collective over all ranks.  The model is built anew for each run.  Losses, reduced gradients of every
    step, parameters, buffers and optimizer state are compared on every rank, and kept in CPU memory for
    that.  On GPUs, call `torch.use_deterministic_algorithms(True)` first: otherwise attention does not repeat
    its bits.

    Args:
        build_model: function that returns the unsharded model.
        batches: function of rank and world size that yields a batch for each microbatch, the same ones each
            time.
        switches: names of `Switch`; default: all that make a difference to the model.
        precision: dtypes, as for `FlatFSDP`.
        policy: policy that picks units, as for `auto_wrap`; default: the items of the outermost lists of
            modules, such as the layers of a Hugging Face model.
        recipe: recipe of `fp8.autocast` around the steps; default: no FP8.
        loss: function of model and batch; default: the model's result, or its `.loss` or `["loss"]`.
        steps: number of optimizer steps.
        microbatches: number of microbatches in a step.
        lr: learning rate.
        max_norm: largest norm of gradients, to which they are clipped.
        seed: seed of parameters and of dropout.
        device: device to train on; default: the current GPU with NCCL, otherwise the CPU.
        self_test: damage one bit of one gradient in the runs with the switch on, which must be found.

    Raises:
        ValueError: for a switch that is unknown or makes no difference to the model; if batches end early, or
            there is no loss.
        RuntimeError: if no microbatch was replayed, and the switch is "replay".
    """
    job = ModelJob(build_model, batches, policy, loss, steps, microbatches, lr, max_norm, seed)
    default = "cuda" if dist.get_backend() == "nccl" else "cpu"
    rank = Rank(dist.get_rank(), dist.get_world_size(), indexed(torch.device(device or default)))
    model = job.built()
    usual = Sharding(precision or default_precision(dict(model.named_parameters())), recipe)
    fuses = next(fusing(model), None) is not None
    caches = loss is None and "is_first_microbatch" in inspect.signature(model.forward).parameters
    wanted = list(Switch) if switches is None else [Switch(switch) for switch in switches]
    on_gpus = rank.device.type == "cuda"
    why_not = {
        switch: switch.why_not(usual, microbatches, on_gpus=on_gpus, fuses=fuses, caches=caches)
        for switch in wanted
    }
    left_out = {switch.value: why for switch, why in why_not.items() if why is not None}
    if switches is not None and left_out:
        raise ValueError("; ".join(f"switch {name!r}: {why}" for name, why in left_out.items()))
    rows = [
        compare(job.trainee, switch, usual, rank, self_test=self_test)
        for switch in wanted
        if why_not[switch] is None
    ]
    options = {"steps": steps, "microbatches": microbatches, "lr": lr, "max_norm": max_norm, "seed": seed}
    return Parity(rows, left_out, {"world_size": rank.world, "options": options})


def compare(
    make: MakeTrainee,
    switch: Switch,
    usual: Sharding,
    rank: Rank,
    *,
    self_test: bool = False,
    on_step: OnStep = ignore,
    about: dict[str, Any] | None = None,
) -> Comparison:
    """Trains with a switch off and on, and compares the evidence of all ranks; the same on every rank.

    Args:
        make: function that makes the model.
        switch: the switch.
        usual: sharding, apart from the switch.
        rank: this rank.
        self_test: damage one bit of one gradient on the last rank, with the switch on.
        on_step: called after every step of both runs.
        about: facts about the row.
    """
    # On one rank only, and not the one that reports: the verdict must come from all ranks.
    damages = self_test and rank.index == rank.world - 1

    def observed(
        sharding: Sharding, recorder: GradientRecorder
    ) -> tuple[RunSummary, dict[str, NamedTensors]]:
        # The model is freed at the end.
        trained = train(make, sharding, rank, on_step, recorder)
        return trained.summary, evidence(trained, recorder.gradients)

    off, on = switch.applied(usual)
    first, first_evidence = observed(off, GradientRecorder())
    second, second_evidence = observed(on, GradientRecorder(damages))
    differences = differences_on_all_ranks(first_evidence, second_evidence, rank)
    return Comparison(switch.value, switch.ends, first, second, differences, about or {})
