"""The gain of fused weight gradients and cached FP8 weights, on one transformer layer under FlatFSDP.

Each row adds one thing to the previous one: FP8 GEMMs; weights cast to FP8 once a step instead of in every
microbatch; weight gradients added to the FP32 buffer inside the GEMM instead of by autograd.

    python examples/performance.py                                  # on a GPU: hidden 4096, sequence 2048
    python examples/performance.py --device cpu                     # small sizes
    torchrun --nproc-per-node 4 examples/performance.py             # sharded over four ranks
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from flatfsdp import FlatFSDP, Precision, microbatches
from flatfsdp.fp8 import DelayedScaling, autocast
from flatfsdp.layers import TransformerLayer


@dataclass(frozen=True)
class Setting:
    """One row of the table."""

    name: str
    fp8: bool = False
    caches_weights: bool = False
    fuses_wgrad: bool = False


SETTINGS = (
    Setting("bf16"),
    Setting("+ FP8 GEMMs", fp8=True),
    Setting("+ weights cast once a step", fp8=True, caches_weights=True),
    Setting("+ weight gradients fused", fp8=True, caches_weights=True, fuses_wgrad=True),
)


def build(setting: Setting, hidden: int, heads: int, device: torch.device) -> FlatFSDP:
    layer = TransformerLayer(
        hidden,
        4 * hidden,
        heads,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        fuse_qkv_params=True,
        fuse_wgrad_accumulation=setting.fuses_wgrad,
    )
    return FlatFSDP(
        layer,
        device=device,
        precision=Precision(compute=torch.bfloat16),
        reshard_after_forward=False,
        optimize_backward_concat=True,
    )


def step(
    model: FlatFSDP, setting: Setting, batches: list[tuple[Tensor, Tensor]], optimizer: torch.optim.Optimizer
) -> None:
    """Runs forward and backward of all microbatches, then the optimizer."""
    recipe = DelayedScaling(amax_history_len=16)
    for x_sbc, dy_sbc in microbatches(model, batches):
        is_first = model.fsdp_state.shared.microbatch.is_first if setting.caches_weights else None
        with autocast(enabled=setting.fp8, recipe=recipe):
            y_sbc = model(x_sbc, is_first_microbatch=is_first)
        y_sbc.backward(dy_sbc)
    optimizer.step()
    optimizer.zero_grad()


def measure(
    setting: Setting,
    hidden: int,
    heads: int,
    batches: list[tuple[Tensor, Tensor]],
    steps: int,
    device: torch.device,
) -> tuple[float, float]:
    """Mean milliseconds of a step, and the bytes per parameter that adding up gradients moved in it."""
    torch.manual_seed(0)
    model = build(setting, hidden, heads, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)

    def run() -> float:
        synchronize(device)
        start = time.perf_counter()
        for _ in range(steps):
            model.fsdp_state.shared.ledger.reset()
            step(model, setting, batches, optimizer)
        synchronize(device)
        return 1e3 * (time.perf_counter() - start) / steps

    run()
    return run(), model.fsdp_state.shared.ledger.bytes_per_parameter().get("accumulate", 0.0)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def main(
    device: Annotated[str, typer.Option(help="cuda or cpu; default: cuda if there is one.")] = "",
    hidden: Annotated[int | None, typer.Option(help="Default: 4096 on a GPU, 128 on a CPU.")] = None,
    heads: Annotated[int | None, typer.Option(help="Default: 32 on a GPU, 4 on a CPU.")] = None,
    seq: Annotated[int | None, typer.Option(help="Default: 2048 on a GPU, 64 on a CPU.")] = None,
    batch: Annotated[int, typer.Option(help="Sequences in a microbatch.")] = 4,
    accumulation: Annotated[int, typer.Option("--microbatches", min=1, help="In one step.")] = 8,
    steps: Annotated[int, typer.Option(min=1, help="Steps to average over.")] = 5,
) -> None:
    """What fused weight gradients and cached FP8 weights give, under FlatFSDP.

    For example:

    python examples/performance.py --device cpu

    torchrun --nproc-per-node 4 examples/performance.py
    """
    on_gpu = (device or ("cuda" if torch.cuda.is_available() else "cpu")) == "cuda"
    place = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(place)
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timedelta(seconds=300))
    hidden = hidden or (4096 if on_gpu else 128)
    heads = heads or (32 if on_gpu else 4)
    seq = seq or (2048 if on_gpu else 64)
    batches = [
        tuple(torch.randn(seq, batch, hidden, device=place, dtype=torch.bfloat16) for _ in range(2))
        for _ in range(accumulation)
    ]
    table = Table(
        "setting",
        "ms a step",
        "against bf16",
        "bytes a parameter\nto add up gradients",
        title=f"{place}, hidden {hidden}, sequence {seq}, batch {batch}, {accumulation} microbatches a step",
    )
    first = 0.0
    for setting in SETTINGS:
        ms, nbytes = measure(setting, hidden, heads, batches, steps, place)
        first = first or ms
        table.add_row(setting.name, f"{ms:.2f}", f"{first / ms:.2f}x", f"{nbytes:.1f}")
    if int(os.environ.get("RANK", 0)) == 0:
        Console().print(table)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    typer.run(main)
