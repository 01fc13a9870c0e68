"""The same engine on CUDA streams and NCCL."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from flatfsdp import Debug, Precision, Prefetch, auto_wrap, by_class, microbatches
from flatfsdp.models.gpt import MLP
from tests.support.gpu.marks import NEEDS_GPU, one_gpu_each
from tests.support.gpu.models import BF16, SMALL, WIDE, WORLD_SIZES, build, tokens, train
from tests.support.meshes import REPLICATED
from tests.support.models import repeatable, same_trace
from tests.support.ranks import on_ranks

pytestmark = NEEDS_GPU


@pytest.mark.parametrize("precision", [Precision(), BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": False}, REPLICATED], ids=str)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@on_ranks(backend="nccl")
@repeatable()
def test_flag_on_equals_flag_off(rank: int, options: dict[str, Any], precision: Precision) -> None:
    options = {"precision": precision, **options}
    batches = tokens(SMALL, rank, 3)
    reference = train(build(**options), batches)
    variants: list[dict[str, Any]] = [
        {},
        {"debug": Debug(poison_on_free=True)},
        {"debug": Debug(poison_on_free=True), "prefetch": Prefetch(2, 2)},
        {"debug": Debug(poison_on_free=True), "prefetch": Prefetch(0, 0)},
    ]
    traces = [train(build(optimize_backward_concat=True, **options, **v), batches) for v in variants]
    for variant, trace in zip(variants, traces, strict=True):
        equal = same_trace(reference, trace)
        assert all(equal.values()), (variant, equal)


@one_gpu_each(2)
@on_ranks(backend="nccl")
def test_trace_shows_no_concat_and_overlapped_reductions() -> None:
    """Kernel intervals of a step, after two of warm-up; the model itself concatenates nothing."""
    model = auto_wrap(
        nn.Sequential(*(MLP(WIDE) for _ in range(WIDE.layers))),
        by_class(MLP),
        device="cuda",
        optimize_backward_concat=True,
        precision=BF16,
        # A launch that carries an identity may have the name of an all-gather.
        debug=Debug(check_collectives=False),
    )
    # Enough per unit that the GPU is the limit while the host records.
    batches = [torch.randn(16, WIDE.seq, WIDE.hidden, device="cuda") for _ in range(2)]
    for _ in range(2):
        for batch in microbatches(model, batches):
            model(batch).square().mean().backward()
    torch.cuda.synchronize()
    shares = []
    for _ in range(3):
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
            for batch in microbatches(model, batches):
                model(batch).square().mean().backward()
            torch.cuda.synchronize()
        events = trace.events()
        kernels = [e for e in events if e.device_type == torch.autograd.DeviceType.CUDA]
        reductions = [e.time_range for e in kernels if "ReduceScatter" in e.name]
        compute = [e.time_range for e in kernels if "nccl" not in e.name.lower() and "flatfsdp" not in e.name]
        overlapped = sum(
            max(0.0, min(r.end, c.end) - max(r.start, c.start)) for r in reductions for c in compute
        )
        assert [e.name for e in events if e.name in ("aten::cat", "SplitWithSizesBackward0")] == []
        assert len(reductions) == WIDE.layers
        shares.append(overlapped / sum(r.end - r.start for r in reductions))
    # Where other processes take turns on the GPU, kernels of one step may stand still beside each other.
    assert max(shares) > 0.5
