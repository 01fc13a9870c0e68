"""`plan`: predicts whether a run fits, what it sends and how long a step takes, without building anything.

In:   the options of `examples/pretrain_llama.py`, or a user's own model, and a number of GPUs.
Out:  a report; exit code 1 if it does not fit.
Next: `plan_report.py` prints it; `plan_model.py` does so for a user's own model.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from flatfsdp.cli.console import given, results_console, usage_errors
from flatfsdp.cli.plan_model import ModelPlanJob, ModelPlanReport, kind_of
from flatfsdp.cli.plan_report import PlanReport, SearchReport
from flatfsdp.models import PRESETS, LlamaConfig
from flatfsdp.plan import Job, Machine, Parallelism, search
from flatfsdp.training import command_options
from flatfsdp.training.choices import Fusion, PrecisionName


def plan(
    context: typer.Context,
    preset: command_options.OfModel = "8b",
    config: command_options.Config = None,
    layers: Annotated[
        int | None, typer.Option(help="Layers; this and the sizes below replace the preset's.")
    ] = None,
    hidden: Annotated[int | None, typer.Option(help="Width of the model.")] = None,
    ffn: Annotated[int | None, typer.Option(help="Width of gate and up each.")] = None,
    heads: Annotated[int | None, typer.Option(help="Query heads.")] = None,
    kv_heads: Annotated[int | None, typer.Option(help="Key/value heads (groups).")] = None,
    vocab: Annotated[int | None, typer.Option(help="Size of the vocabulary.")] = None,
    seq: Annotated[int | None, typer.Option(help="Tokens in a sequence.")] = None,
    gpus: Annotated[int, typer.Option(min=1, help="Number of all GPUs.")] = 8,
    batch: command_options.ReplicaBatch = 1,
    microbatches: command_options.Microbatches = 1,
    tp: command_options.TP = 1,
    sequence_parallel: command_options.SequenceParallel = False,
    pp: command_options.PP = 1,
    schedule: command_options.OfPipeline = "1f1b",
    stages_per_rank: command_options.StagesPerRank = 2,
    dp_shard: command_options.DPShard = -1,
    dp_replicate: command_options.DPReplicate = 1,
    zero: command_options.Zero = 3,
    precision: command_options.OfProducts = PrecisionName.bf16,
    fp8_weights: command_options.KeepFP8Weights = False,
    fusion: Annotated[Fusion, typer.Option(help="Fusion of weight gradients into FP32.")] = Fusion.fused,
    search_layouts: Annotated[
        bool,
        typer.Option("--search", help="Find the fastest layouts that fit; ignores --tp to --zero."),
    ] = False,
    global_batch: Annotated[
        int | None, typer.Option(min=1, help="Sequences in a step of all ranks; for --search.")
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="Layouts that --search shows.")] = 8,
    hugging_face: Annotated[
        Path | None,
        typer.Option(help="Plan a Hugging Face model instead: its config.json, or the folder that has it."),
    ] = None,
    fuse: Annotated[
        bool, typer.Option("--fuse", help="With --hugging-face: fused, as flatfsdp.compat.transformers.fuse.")
    ] = False,
    checkpoint_layers: Annotated[
        bool, typer.Option("--checkpoint-layers", help="With --hugging-face: layers run again in backward.")
    ] = False,
    model: Annotated[
        str | None,
        typer.Option(help="Plan your own model: package.module:build or file.py:build, with --batches."),
    ] = None,
    batches: Annotated[
        str | None, typer.Option(help="With --model: a function of rank and world size that yields batches.")
    ] = None,
    machine: Annotated[
        Path | None, typer.Option(help="JSON file with numbers of `flatfsdp.plan.Machine`; default: H200s.")
    ] = None,
    gpu_memory: Annotated[
        float | None, typer.Option(help="Memory of a GPU in GB; default: 141, an H200.")
    ] = None,
    gpus_per_host: Annotated[
        int | None, typer.Option(min=1, help="GPUs that NVLink connects; default: 8.")
    ] = None,
    link_bandwidth: Annotated[
        float | None, typer.Option(help="GB/s that a GPU sends in its host; default: 330, measured.")
    ] = None,
    network_bandwidth: Annotated[
        float | None, typer.Option(help="GB/s that a GPU sends to other hosts; default: 40.")
    ] = None,
    as_json: command_options.Json = False,
) -> None:
    """Plan a run: whether a model fits, what each rank sends, how long a step takes.

    No GPU or process group is needed, and no parameter gets memory. Exits with 1 if the plan does not fit.

    By default it is the Llama of this project, shared over ranks in any way. With [bold]--hugging-face[/bold]
    it is the model of a configuration, and with [bold]--model[/bold] and [bold]--batches[/bold] any model of
    yours, both sharded over all GPUs. They take --gpus, --microbatches, --zero, --precision, --fp8-weights
    and the options of the machine; --hugging-face takes --batch and --seq, too.

    [bold]Examples[/bold]

    [green]python -m flatfsdp plan --preset 8b --gpus 4 --precision fp8-delayed --fp8-weights[/green]

    [green]python -m flatfsdp plan --preset 70b --gpus 64 --tp 8 --sequence-parallel --pp 2
    --microbatches 16[/green]

    [green]python -m flatfsdp plan --preset 70b --layers 100 --gpus 4096 --precision fp8-delayed --fp8-weights
    --search --global-batch 4096[/green]

    [green]python -m flatfsdp plan --hugging-face path/to/config.json --gpus 8 --seq 4096 --fuse
    --precision fp8-delayed --fp8-weights[/green]

    [green]python -m flatfsdp plan --model my_model.py:build --batches my_model.py:batches --gpus 4[/green]

    [green]python -m flatfsdp plan --preset 8b --gpus 16 --gpu-memory 80 --json[/green]
    """
    with usage_errors():
        hosts = Machine() if machine is None else Machine.load(machine)
        hosts = hosts.with_gb(
            gpu_memory=gpu_memory, link_bandwidth=link_bandwidth, network_bandwidth=network_bandwidth
        )
        if gpus_per_host is not None:
            hosts = replace(hosts, gpus_per_host=gpus_per_host)
        kind = kind_of(given(context))
        if kind is not None:
            brought = ModelPlanJob(gpus, microbatches, zero, precision, fp8_weights, hosts)
            conclude(
                brought.own(str(model), str(batches))
                if hugging_face is None
                else brought.hugging_face(
                    hugging_face, batch, seq, fuse=fuse, checkpoint_layers=checkpoint_layers
                ),
                as_json,
            )
        base = PRESETS[preset] if config is None else LlamaConfig.load(config)
        sizes = {
            **{"layers": layers, "hidden": hidden, "ffn": ffn, "heads": heads},
            **{"kv_heads": kv_heads, "vocab": vocab, "seq": seq},
        }
        job = Job(
            replace(base, **{name: size for name, size in sizes.items() if size is not None}),
            Parallelism.over(gpus)
            if search_layouts
            else Parallelism.over(
                gpus,
                pp=pp,
                dp_replicate=dp_replicate,
                dp_shard=dp_shard,
                tp=tp,
                sequence_parallel=sequence_parallel,
            ),
            batch=batch,
            microbatches=microbatches,
            precision=precision.dtypes(fp8_weights),
            recipe=precision.recipe,
            fuse_wgrad_accumulation=fusion.option,
            schedule=schedule,
            stages_per_rank=stages_per_rank,
            reshard_after_forward=zero == 3,
        )
        report: PlanReport | SearchReport
        if search_layouts:
            if global_batch is None:
                raise ValueError("--search needs --global-batch, the sequences in a step of all ranks")
            report = SearchReport(job, hosts, global_batch, search(job, hosts, global_batch, top))
        else:
            report = PlanReport.of(job, hosts)
    conclude(report, as_json)


def conclude(report: PlanReport | SearchReport | ModelPlanReport, as_json: bool) -> NoReturn:
    """Prints the report; ends with its exit code."""
    if as_json:
        print(report.json())
    else:
        report.show(results_console())
    raise typer.Exit(0 if report.fits else 1)
