"""`verify`: checks for a user's own model that switches change no bit.

In:   functions that build a model and yield batches.
Out:  a `Parity` with one row a switch, the same on every rank.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from flatfsdp.comm.device import indexed
from flatfsdp.comm.launch import Rank
from flatfsdp.comm.text_table import plain_table
from flatfsdp.contract.any_model import Batches, BuildModel, Loss
from flatfsdp.engine.claim import default_precision
from flatfsdp.engine.wrap import WrapPolicy
from flatfsdp.fp8 import Recipe
from flatfsdp.parity.any_model import ModelJob, train
from flatfsdp.parity.evidence import KINDS, Compared, compared
from flatfsdp.parity.switches import ModelSwitch, Sharding
from flatfsdp.policy import Precision
from flatfsdp.profiling.figures import to_json


@dataclass(frozen=True)
class ParityRow(Compared):
    """Comparison of a model's runs with one switch off and on."""

    switch: str

    @property
    def ends(self) -> tuple[str, str]:
        """Names of the two runs, off and on."""
        return ModelSwitch(self.switch).ends


@dataclass(frozen=True)
class Parity:
    """Result of `verify`.

    Attributes:
        left_out: switches that make no difference to the model, each with the reason.
    """

    rows: list[ParityRow]
    left_out: dict[str, str]
    world_size: int

    @property
    def equal(self) -> bool:
        """Whether no switch has changed a bit."""
        return all(row.equal for row in self.rows)

    def differences(self) -> list[str]:
        """One line for each difference."""
        return [line for row in self.rows for line in row.lines(" / ".join(row.ends))]

    def require(self) -> None:
        """Raises AssertionError, with all differences, unless everything is equal."""
        if not self.equal:
            raise AssertionError("\n".join(self.differences()))

    def json(self) -> str:
        """The result as JSON."""
        rows = [{**asdict(row), "equal": row.equal} for row in self.rows]
        about = {"world_size": self.world_size, "left_out": self.left_out}
        return to_json({"equal": self.equal, **about, "rows": rows}, indent=2)

    def __str__(self) -> str:
        lines: list[tuple[str, ...]] = [("off", "on", "final loss", *KINDS)]
        for row in self.rows:
            verdicts = ("DIFFER" if places else "equal" for places in row.differences.values())
            lines.append((*row.ends, f"{row.off.losses[-1]:.6f}", *verdicts))
        return "\n".join([plain_table(lines, right={2}), *self.differences()])


def verify(
    build_model: BuildModel,
    batches: Batches,
    *,
    switches: Iterable[ModelSwitch | str] | None = None,
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

        parity = verify(build_model, batches, switches=["flag", "in-place"])
        parity.require()

    Collective over all ranks.  The model is built anew for each run.  Losses, reduced gradients of every
    step, parameters, buffers and optimizer state are compared on every rank, and kept in CPU memory for
    that.  On GPUs, call `torch.use_deterministic_algorithms(True)` first: otherwise attention does not repeat
    its bits.

    Args:
        build_model: function that returns the unsharded model.
        batches: function of rank and world size that yields a batch for each microbatch, the same ones each
            time.
        switches: names of `ModelSwitch`; default: all that make a difference to the model.
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
    """
    job = ModelJob(build_model, batches, policy, loss, steps, microbatches, lr, max_norm, seed)
    rank = Rank(dist.get_rank(), dist.get_world_size(), _device(device))
    torch.manual_seed(seed)
    model = build_model()
    usual = Sharding(precision or default_precision(dict(model.named_parameters())), recipe)
    chosen, left_out = _chosen(switches, model, usual, rank.device.type == "cuda")
    rows = [_compare(job, switch, usual, rank, self_test) for switch in chosen]
    return Parity(rows, left_out, rank.world)


def _device(device: torch.device | str | None) -> torch.device:
    if device is None:
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    return indexed(torch.device(device))


def _chosen(
    switches: Iterable[ModelSwitch | str] | None, model: nn.Module, usual: Sharding, on_gpus: bool
) -> tuple[list[ModelSwitch], dict[str, str]]:
    """Chooses the switches that make a difference, and says why others do not.

    Raises:
        ValueError: if one that was asked for makes none.
    """
    wanted = list(ModelSwitch) if switches is None else [ModelSwitch(switch) for switch in switches]
    why_not = {switch: switch.why_not(model, usual, on_gpus) for switch in wanted}
    left_out = {switch.value: why for switch, why in why_not.items() if why is not None}
    if switches is not None and left_out:
        raise ValueError("; ".join(f"switch {name!r}: {why}" for name, why in left_out.items()))
    return [switch for switch in wanted if why_not[switch] is None], left_out


def _compare(job: ModelJob, switch: ModelSwitch, usual: Sharding, rank: Rank, self_test: bool) -> ParityRow:
    off, on = (partial(train, job, sharding, rank) for sharding in switch.applied(usual))
    found = compared(off, on, rank, job.steps, self_test=self_test)
    return ParityRow(**vars(found), switch=switch.value)
