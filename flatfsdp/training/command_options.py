"""Settings of training as options of a command line: each written once, for commands, examples, benchmarks.

Needs typer, which `pip install 'flatfsdp[cli]'` brings; the library itself never imports this.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flatfsdp.comm.launch import Device
from flatfsdp.models.config import PresetName
from flatfsdp.models.pipeline import ScheduleName
from flatfsdp.options import GradSync
from flatfsdp.training.choices import PrecisionName

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
NumRanks = Annotated[
    int | None,
    typer.Option(min=1, help="Processes to start; 2 if left out. Under torchrun: torchrun's own."),
]
OnDevice = Annotated[
    Device,
    typer.Option(
        "--device", help="auto takes the GPUs if there is one a rank; with shared-cuda ranks may share GPUs."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print the report as JSON, and nothing else, on stdout.")]

# ---- a Llama, and how ranks share it ----------------------------------------------------------------------

OfModel = Annotated[PresetName, typer.Option("--preset", help="Sizes of the model.")]
Config = Annotated[Path | None, typer.Option(help="JSON file with the sizes instead.")]
ReplicaBatch = Annotated[int, typer.Option("--batch", min=1, help="Sequences in a microbatch, of a replica.")]
TP = Annotated[int, typer.Option(min=1, help="Ranks that share each layer.")]
SequenceParallel = Annotated[bool, typer.Option(help="The --tp ranks share the sequence, too.")]
PP = Annotated[int, typer.Option(min=1, help="Pipeline ranks.")]
OfPipeline = Annotated[ScheduleName, typer.Option("--schedule", help="Schedule of the pipeline.")]
StagesPerRank = Annotated[int, typer.Option(min=2, help="Stages on each rank, with --schedule interleaved.")]
DPShard = Annotated[int, typer.Option(help="Ranks that share parameters; -1: all the others.")]
DPReplicate = Annotated[
    int, typer.Option(help="Replicas of each set of shards (HSDP); -1, beside --dp-shard: all others.")
]
Zero = Annotated[int, typer.Option(min=2, max=3, help="3 reshards parameters after forward.")]
OfReductions = Annotated[
    GradSync, typer.Option("--grad-sync", help="Reduce gradients in the last microbatch, or in every one.")
]
OfProducts = Annotated[PrecisionName, typer.Option("--precision", help="Dtype of GEMMs.")]
Replay = Annotated[bool, typer.Option("--replay", help="Run microbatches as CUDA graphs; on GPUs.")]
KeepFP8Weights = Annotated[bool, typer.Option(help="Keep weights in FP8 in the flat buffers.")]
