"""Steps with gradients that are not finite, unknown to the host: the device decides, and nobody waits."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from flatfsdp import FlatFSDP, Precision, auto_wrap, by_class, checkpoint, microbatches, param_groups
from flatfsdp.fp8 import CurrentScaling, DelayedScaling, autocast
from flatfsdp.layers import LayerNormMLP
from flatfsdp.optim import SGD, AdamW, NonFiniteGradientError
from tests.support.fp8_training import same_on_all_ranks
from tests.support.gpu.marks import FP8_GEMMS, one_gpu_each
from tests.support.gpu.waiting import without_synchronisation
from tests.support.models import repeatable, same, update
from tests.support.ranks import on_ranks

pytestmark = FP8_GEMMS
ON_RANKS = pytest.mark.parametrize("world_size", [1, 2, 4])
HIDDEN, TOKENS, MICROBATCHES, STEPS = 256, 128, 2, 6
RECIPES: dict[str, Any] = {
    "bf16": None,
    "delayed": DelayedScaling(amax_history_len=4),
    "stored": CurrentScaling(),
}
KINDS = pytest.mark.parametrize("kind", RECIPES)
CLIPPING = pytest.mark.parametrize("max_grad_norm", [None, 1.0], ids=["plain", "clipped"])
MODES = pytest.mark.parametrize("mode", ["raise", "skip", "step"])


def adamw(groups: Any, **options: Any) -> AdamW:
    return AdamW(groups, lr=1e-2, **options)


def sgd(groups: Any, **options: Any) -> SGD:
    return SGD(groups, lr=0.1, momentum=0.9, dampening=0.5, **options)


class Training:
    """A model of FP8 layers, its optimizer, and its data on the device."""

    def __init__(self, rank: int, kind: str, make: Any = adamw, layers: int = 3, **options: Any) -> None:
        torch.manual_seed(0)
        net = nn.Sequential(
            *(
                LayerNormMLP(HIDDEN, 2 * HIDDEN, activation="swiglu", fuse_wgrad_accumulation=True)
                for _ in range(layers)
            ),
            nn.Linear(HIDDEN, 48),
        )
        weights = CurrentScaling() if kind == "stored" else None
        self.model: FlatFSDP = auto_wrap(
            net,
            by_class(LayerNormMLP),
            device="cuda",
            precision=Precision(compute=torch.bfloat16, fp8_weights=weights),
            optimize_backward_concat=True,
        )
        small = {"params": lambda name, shape: len(shape) < 2, "weight_decay": 0.0}
        self.optimizer = make(param_groups(self.model, [small]), **options)
        self.recipe = RECIPES[kind]
        generator = torch.Generator().manual_seed(rank)
        self.batches = [
            [torch.randn(TOKENS, HIDDEN, generator=generator).cuda() for _ in range(MICROBATCHES)]
            for _ in range(STEPS)
        ]
        self.one, self.nan = torch.ones((), device="cuda"), torch.full((), torch.nan, device="cuda")

    def forward_backward(self, step: int, *, is_bad: bool = False) -> list[Tensor]:
        """Losses; the first one of a bad step is multiplied by NaN."""
        losses = []
        for x in microbatches(self.model, self.batches[step]):
            with autocast(enabled=self.recipe is not None, recipe=self.recipe):
                loss = self.model(x).float().square().mean()
            (loss * (self.nan if is_bad and not losses else self.one)).backward()
            losses.append(loss.detach())
        return losses

    def train(self, steps: Iterable[int], bad: int | None, bad_rank: int) -> tuple[list[Tensor], list[int]]:
        """Losses of all steps except the bad one, and the steps that raised an error."""
        losses, raised = [], []
        for step in steps:
            found = self.forward_backward(step, is_bad=step == bad and dist.get_rank() == bad_rank)
            losses += found if step != bad else []
            try:
                self.optimizer.step()
            except NonFiniteGradientError:
                raised.append(step)
                # This step's gradients are complete, and it has not begun.
                self.optimizer.step()
            self.optimizer.zero_grad()
        return losses, raised

    def state(self) -> list[Tensor]:
        """Weights and FP8 scales, and the optimizer's state of this rank."""
        whole = checkpoint.full_state_dict(self.model)
        found = [value for _, value in sorted(whole.items()) if isinstance(value, Tensor)]
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                found += [value for _, value in sorted(self.optimizer.state[parameter].items())]
        return [value.detach().clone() for value in found]


def random_bad(world_size: int, seed: str) -> tuple[int, int]:
    """A step and a rank, the same on all ranks."""
    chosen = random.Random(seed)
    return chosen.randrange(STEPS - 2), chosen.randrange(world_size)


# ---- what is left -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [adamw, sgd], ids=lambda each: each.__name__)
@pytest.mark.parametrize("mode", ["raise", "skip"])
@CLIPPING
@KINDS
@ON_RANKS
@on_ranks(backend="nccl")
@repeatable()
def test_as_if_the_step_had_not_been(
    rank: int, world_size: int, kind: str, max_grad_norm: float | None, mode: str, make: Any
) -> None:
    """The rest of the training is bit-equal; "raise" is one step late."""
    bad, bad_rank = random_bad(world_size, f"{kind} {max_grad_norm} {mode} {make.__name__}")
    options = {"nonfinite": mode, "max_grad_norm": max_grad_norm}
    ours, theirs = (Training(rank, kind, make, **options) for _ in range(2))
    ours_before, _ = ours.train(range(bad + 1), bad, bad_rank)
    theirs_before, _ = theirs.train(range(bad), None, 0)
    assert same(ours_before, theirs_before)
    if bad > 0:
        assert same(ours.state(), theirs.state()), "right after the step"
    later = range(bad + 1, STEPS)
    (ours_later, raised), (theirs_later, none) = ours.train(later, None, 0), theirs.train(later, None, 0)
    assert same(ours_later, theirs_later)
    state = ours.state()
    assert same(state, theirs.state()) and all(value.isfinite().all() for value in state)
    assert raised == ([bad + 1] if mode == "raise" else []) and none == []
    assert ours.optimizer.skipped_steps == 1 and theirs.optimizer.skipped_steps == 0
    whole = [value for value in checkpoint.full_state_dict(ours.model).values() if isinstance(value, Tensor)]
    assert same_on_all_ranks([ours.optimizer.skipped_steps, *whole])


@KINDS
@ON_RANKS
@on_ranks(backend="nccl")
def test_a_step_that_goes_on_anyway(rank: int, world_size: int, kind: str) -> None:
    """Clipped by a norm that is NaN, all weights of all ranks become NaN."""
    bad, bad_rank = random_bad(world_size, kind)
    training = Training(rank, kind, nonfinite="step", max_grad_norm=1.0)
    _, raised = training.train(range(bad + 1), bad, bad_rank)
    assert all(parameter.isnan().all() for parameter in training.model.parameters() if parameter.numel())
    assert raised == [] and training.optimizer.skipped_steps == 0
    assert training.optimizer.grad_norm.isnan()


@ON_RANKS
@on_ranks(backend="nccl")
def test_whoever_reads_the_state_hears_of_the_last_step(rank: int, world_size: int) -> None:
    training = Training(rank, "bf16")
    for read in (
        training.optimizer.raise_if_nonfinite,
        lambda: checkpoint.full_optimizer_state_dict(training.model, training.optimizer),
    ):
        training.train([0], 0, world_size - 1)
        for action in (training.optimizer.state_dict, read):
            with pytest.raises(NonFiniteGradientError, match="norm was nan"):
                action()
        read()


# ---- nobody waits -----------------------------------------------------------------------------------------


@MODES
@CLIPPING
@KINDS
@ON_RANKS
@on_ranks(backend="nccl")
def test_a_step_does_not_synchronize(
    rank: int, world_size: int, kind: str, max_grad_norm: float | None, mode: str
) -> None:
    """A whole step, also with bad gradients, passes PyTorch's own synchronisation check."""
    training = Training(rank, kind, nonfinite=mode, max_grad_norm=max_grad_norm)
    training.train(range(2), None, 0)
    training.optimizer.raise_if_nonfinite()
    with without_synchronisation():
        training.forward_backward(2, is_bad=rank == world_size - 1)
        update(training.optimizer)
    if mode == "raise":
        with pytest.raises(NonFiniteGradientError):
            training.optimizer.raise_if_nonfinite()


WAITS = {
    "cudaStreamSynchronize",
    "cudaDeviceSynchronize",
    "cudaMemcpy",
    "cuStreamSynchronize",
    "cuCtxSynchronize",
}


def recorded_step(training: Training) -> tuple[Counter[str], int]:
    """Calls of the CUDA runtime inside `optimizer.step()`, and the number of kernels launched."""
    training.forward_backward(3)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        with record_function("the optimizer's step"):
            training.optimizer.step()
        torch.cuda.synchronize()
    events = list(recorded.events() or ())
    on_host = [event for event in events if event.device_type == DeviceType.CPU]
    span = next(event for event in on_host if event.name == "the optimizer's step").time_range
    calls = Counter(
        event.name
        for event in on_host
        if event.name.startswith("cu") and span.start <= event.time_range.start <= span.end
    )
    kernels = sum(count for name, count in calls.items() if "Launch" in name)
    training.optimizer.zero_grad()
    return calls, kernels


@MODES
@CLIPPING
@ON_RANKS
@on_ranks(backend="nccl")
def test_what_the_host_asks_of_the_runtime(rank: int, world_size: int, max_grad_norm: Any, mode: str) -> None:
    """The only wait is for the previous step, if it is to raise; and launches are few."""
    counts = []
    for layers in (2, 8):
        training = Training(rank, "delayed", layers=layers, nonfinite=mode, max_grad_norm=max_grad_norm)
        training.train(range(3), None, 0)
        calls, kernels = recorded_step(training)
        assert calls, "the profiler has seen the runtime"
        assert WAITS.isdisjoint(calls), calls
        assert calls["cudaEventSynchronize"] == (mode == "raise"), calls
        counts.append(kernels)
    if rank == 0:
        print(f"{world_size} ranks, {mode}, max_grad_norm={max_grad_norm}: {counts} launches, 2 and 8 layers")
    # Lists of tensors are split into launches of some dozens each.
    assert counts[1] - counts[0] <= 6, counts


@MODES
@one_gpu_each(1, 2, 4)
@on_ranks(backend="nccl")
def test_the_host_is_not_held_up(rank: int, world_size: int, mode: str) -> None:
    """A step is queued behind a second of other work; "raise" waits only for the step before that work."""
    training = Training(rank, "bf16", nonfinite=mode)
    training.train(range(3), None, 0)
    training.forward_backward(3)
    torch.cuda.synchronize()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    torch.cuda._sleep(2_000_000_000)
    end.record()
    begun = time.perf_counter()
    training.optimizer.step()
    host = 1000 * (time.perf_counter() - begun)
    torch.cuda.synchronize()
    assert host < 0.5 * start.elapsed_time(end)
