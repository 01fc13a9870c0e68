"""The options that several commands share, each written once."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from flatfsdp.fp8 import BlockScaling, CurrentScaling, DelayedScaling, Recipe
from flatfsdp.launch import Device
from flatfsdp.models.pipeline import ScheduleName


class Preset(str, Enum):
    """The keys of `PRESETS`."""

    tiny = "tiny"
    debug = "debug"
    llama_1b = "1b"
    llama_8b = "8b"
    llama_70b = "70b"


class Schedule(str, Enum):
    """Those of `LlamaPipeline`."""

    gpipe = "gpipe"
    one_f_one_b = "1f1b"
    interleaved = "interleaved"

    @property
    def option(self) -> ScheduleName:
        return self.value


RECIPES: dict[str, Recipe | None] = {
    "fp32": None,
    "bf16": None,
    "fp8-delayed": DelayedScaling(amax_history_len=16),
    "fp8-current": CurrentScaling(),
    "fp8-block": BlockScaling(),
}
"""How products are scaled, by what they are called."""

Layers = Annotated[int, typer.Option(min=1, help="Transformer layers; each is one unit.")]
Hidden = Annotated[int, typer.Option(min=1, help="Width of the model; a multiple of --heads.")]
Heads = Annotated[int, typer.Option(min=1, help="Attention heads.")]
Seq = Annotated[int, typer.Option(min=1, help="Bytes in one sequence.")]
Batch = Annotated[int, typer.Option(min=1, help="Sequences in one microbatch of one rank.")]
Microbatches = Annotated[int, typer.Option(min=1, help="Microbatches in one optimizer step.")]
Steps = Annotated[int, typer.Option(min=1, help="Optimizer steps.")]
LearningRate = Annotated[float, typer.Option("--lr", help="Learning rate of AdamW.")]
Seed = Annotated[int, typer.Option(help="Decides the initial parameters and the order of the data.")]
Data = Annotated[
    Path | None,
    typer.Option(
        help="File or folder to train on, as bytes. Default: the running Python's own standard library.",
        show_default=False,
    ),
]
Ranks = Annotated[
    int | None,
    typer.Option(min=1, help="Processes to start; 2 if left out. Under torchrun: torchrun's own."),
]
OnDevice = Annotated[Device, typer.Option("--device", help="auto takes the GPUs if there is one a rank.")]
Json = Annotated[bool, typer.Option("--json", help="Print the report as JSON, and nothing else, on stdout.")]

# ---- a Llama, and how ranks share it ----------------------------------------------------------------------

OfModel = Annotated[Preset, typer.Option("--preset", help="Sizes of the model.")]
Config = Annotated[Path | None, typer.Option(help="JSON file with the sizes instead.")]
ReplicaBatch = Annotated[int, typer.Option("--batch", min=1, help="Sequences in a microbatch, of a replica.")]
TP = Annotated[int, typer.Option(min=1, help="Ranks that share each layer.")]
SequenceParallel = Annotated[bool, typer.Option(help="They share the sequence as well.")]
PP = Annotated[int, typer.Option(min=1, help="Pipeline ranks.")]
OfPipeline = Annotated[Schedule, typer.Option("--schedule", help="Of the pipeline.")]
StagesPerRank = Annotated[int, typer.Option(min=2, help="With --schedule interleaved.")]
DPShard = Annotated[int, typer.Option(help="Ranks that share parameters; -1: all the others.")]
DPReplicate = Annotated[int, typer.Option(min=1, help="Replicas of each set of shards.")]
Zero = Annotated[int, typer.Option(min=2, max=3, help="3 frees parameters after use.")]
FP8Weights = Annotated[bool, typer.Option(help="Weights are FP8 in the flat buffers.")]
