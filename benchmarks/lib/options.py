"""Command-line options shared by several benchmarks, and of the commands that fit."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer

from flatfsdp.comm.launch import Device
from flatfsdp.training.command_options import (
    Batch,
    Heads,
    Hidden,
    Json,
    Layers,
    Microbatches,
    OfModel,
    OnDevice,
    Seq,
)

__all__ = [
    "Accumulation",
    "Batch",
    "Breakdown",
    "Heads",
    "Hidden",
    "Json",
    "Layers",
    "Microbatches",
    "OfModel",
    "OnDevice",
    "OneDevice",
    "Out",
    "RanksToStart",
    "Reshard",
    "Rounds",
    "Seq",
    "Steps",
    "Traces",
    "Warmup",
    "one_device",
]

Steps = Annotated[int, typer.Option(min=1, help="Timed steps of each run.")]
Warmup = Annotated[int, typer.Option(min=1, help="Steps before those.")]
Rounds = Annotated[int, typer.Option(min=1, help="Times to measure everything, by turns.")]
Accumulation = Annotated[
    int, typer.Option("--microbatches", min=1, help="Microbatches a step, one sequence each.")
]
Reshard = Annotated[
    bool,
    typer.Option("--reshard/--keep", help="Free parameters after use (ZeRO-3), or once a step (ZeRO-2)."),
]
Traces = Annotated[
    Path | None, typer.Option("--trace", help="Folder for a Chrome trace of one step of each engine.")
]
Breakdown = Annotated[
    bool, typer.Option("--breakdown", help="Profile one more step and sort its kernels by class.")
]
RanksToStart = Annotated[int, typer.Option(min=1, help="Processes to start; torchrun starts its own.")]
OneDevice = Annotated[Device, typer.Option("--device", help="A CPU only shows that it runs, at small sizes.")]
Out = Annotated[
    Path, typer.Option(help="Folder for the JSON and the picture.", show_default="benchmarks/results")
]


def one_device(device: Device) -> torch.device:
    """The device of a benchmark without ranks: the GPU, unless a CPU is requested.

    Raises:
        typer.BadParameter: if there is no GPU.
    """
    if device is Device.cpu:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise typer.BadParameter("there is no CUDA device here; --device cpu only shows that it runs")
    return torch.device("cuda")
