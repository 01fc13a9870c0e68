"""Pipelines of a Llama over NCCL, with tensor or data parallelism: the flag changes no bit."""

from __future__ import annotations

from typing import get_args

import pytest
import torch

from flatfsdp import Precision
from flatfsdp.fp8 import CurrentScaling, DelayedScaling
from flatfsdp.models import LlamaConfig
from flatfsdp.models.pipeline import ScheduleName
from tests.support.gpu.marks import NEEDS_GPU
from tests.support.llamas import SmallPipeline, in_one_process, mesh_of
from tests.support.models import repeatable, same
from tests.support.ranks import on_ranks

pytestmark = NEEDS_GPU
TP = pytest.mark.parametrize("tp", [1, 2], ids=["dp2-pp2", "tp2-pp2"])
SCHEDULES = get_args(ScheduleName)
LARGER = LlamaConfig(4, 1024, 2816, heads=8, kv_heads=4, vocab=4096, seq=512)
BF16 = Precision(compute=torch.bfloat16)


@TP
@on_ranks(4, backend="nccl")
@repeatable()
def test_the_flag_changes_no_bit(tp: int) -> None:
    mesh = mesh_of(pp=2, tp=tp)
    for schedule in SCHEDULES:
        for options in (
            {"sequence_parallel": True},
            {"sequence_parallel": True, "recipe": DelayedScaling(amax_history_len=4)},
            {"recipe": CurrentScaling()},
        ):
            off, on, again = (
                SmallPipeline(
                    schedule, mesh, LARGER, optimize_backward_concat=flag, precision=BF16, **options
                ).train()
                for flag in (False, True, True)
            )
            assert all(torch.isfinite(grad).all() for grad in on.grads)
            for field in ("losses", "grads", "parameters"):
                assert same(getattr(on, field), getattr(again, field)), ("again", schedule, field)
                assert same(getattr(off, field), getattr(on, field)), (schedule, field, options)


@TP
@on_ranks(4, backend="nccl")
def test_fp32_gradients_are_those_of_one_gpu(tp: int) -> None:
    mesh = mesh_of(pp=2, tp=tp)
    losses, grads = in_one_process(mesh.dp_rank, mesh.dp_size, "cuda")
    for schedule in SCHEDULES:
        found = SmallPipeline(schedule, mesh, sequence_parallel=True).train()
        if found.losses:
            torch.testing.assert_close(torch.stack(found.losses), torch.stack(losses), rtol=1e-5, atol=0)
        for name, grad in found.first_grads.items():
            assert (grad - grads[name]).norm() / grads[name].norm() < 1e-4, name
