"""Two ranks of a tiny `LlamaPipeline` that differ, over a pipeline or each layer; and FP8 on one rank."""

from __future__ import annotations

import os
import signal
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import nn

from flatfsdp import auto_wrap, by_class
from flatfsdp.comm.mesh import make_mesh
from flatfsdp.fp8 import autocast
from flatfsdp.layers import Linear
from flatfsdp.models import LlamaConfig, LlamaPipeline
from flatfsdp.optim import AdamW
from tests.support.faults.ranks.program import OwnError
from tests.support.models import update

Where = Literal["pp", "tp"]
Difference = Literal[
    "hidden", "layers", "ffn", "seq", "batch", "microbatches", "killed", "raises", "skips a step"
]

CONFIG = LlamaConfig(vocab=32, hidden=32, layers=2, heads=2, kv_heads=2, ffn=64, seq=16)
OTHER = {"hidden": 64, "layers": 4, "ffn": 128, "seq": 32}
STEPS = 3


def run_llama(rank: int, where: Where, difference: Difference, losses: list[float]) -> None:
    """Trains; the second rank differs from the start, or in the second step."""
    is_odd = rank == 1
    config, steps = CONFIG, {"microbatches": 2, "batch": 2}
    if is_odd and difference in OTHER:
        config = replace(config, **{difference: OTHER[difference]})
    if is_odd and difference in steps:
        steps[difference] = 4
    mesh = make_mesh(**{where: 2})
    model = LlamaPipeline(config, mesh, "1f1b", timeout=2.0, **steps)
    optimizer = AdamW(model.parameters(), lr=1e-3, max_grad_norm=1.0, pp_group=mesh.pp_group)
    for step in range(STEPS):
        if is_odd and step == 1:
            if difference == "skips a step":
                continue
            if difference == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if difference == "raises":
                model.stages[0].register_forward_pre_hook(_raise_own)
        generator = torch.Generator().manual_seed(step)
        shape = steps["batch"], config.seq
        batches = [
            (
                torch.randint(0, 32, shape, generator=generator),
                torch.randint(0, 32, shape, generator=generator),
            )
            for _ in range(steps["microbatches"])
        ]
        losses += [loss.item() for loss in model.forward_backward(batches)]
        update(optimizer)


def _raise_own(*_: Any) -> None:
    raise OwnError("in a stage")


def run_autocast(rank: int, losses: list[float]) -> None:
    """Trains FP8 layers; the second rank computes in FP8 from the second step on."""
    torch.manual_seed(0)
    model = auto_wrap(
        nn.Sequential(*(Linear(32, 32) for _ in range(2))),
        by_class(Linear),
        timeout=2.0,
        optimize_backward_concat=False,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        with autocast() if rank == 1 and step > 0 else nullcontext():
            loss = model(torch.ones(16, 32)).square().mean()
        loss.backward()
        losses.append(loss.item())
        update(optimizer)
