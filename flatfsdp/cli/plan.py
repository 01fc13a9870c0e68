"""`plan`: predicts whether a run fits, what it sends and how long a step takes, without building anything.

In:   the options of `examples/pretrain_llama.py`, or a user's own model, and a number of GPUs.
Out:  a report; exit code 1 if it does not fit.
Next: `plan_report.py` prints it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer

from flatfsdp.cli.console import given, results_console, usage_errors
from flatfsdp.cli.plan_report import PlanReport, SearchReport
from flatfsdp.cli.user_functions import function_named, with_own_layers
from flatfsdp.models import PRESETS, LlamaConfig
from flatfsdp.plan import Job, Machine, Model, Parallelism, search
from flatfsdp.plan import plan as plan_job
from flatfsdp.plan.advice import advise
from flatfsdp.plan.stages import Tracer
from flatfsdp.training import command_options
from flatfsdp.training.choices import Fusion, PrecisionName

_MACHINE = {"machine", "gpu_memory", "gpus_per_host", "link_bandwidth", "network_bandwidth", "as_json"}
_ANY = {"gpus", "dp_shard", "dp_replicate", "zero", "grad_sync", "checkpoint_layers", "precision"}
_ANY |= {"microbatches", "fp8_weights", *_MACHINE}
OPTIONS = {
    "--model": {"model", "batches", *_ANY},
    "--hugging-face": {"hugging_face", "fuse", "batch", "seq", *_ANY},
}
"""Options that apply to each kind of model; all others describe the Llama of this project."""


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
    grad_sync: command_options.OfReductions = "last",
    checkpoint_layers: Annotated[
        bool, typer.Option("--checkpoint-layers", help="Layers keep their input, and run again in backward.")
    ] = False,
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

    No GPU or process group is needed, and no parameter gets memory. If the plan does not fit, it says what is
    too large and which changes would help, and exits with 1.

    By default it is the Llama of this project, shared over ranks in any way. With [bold]--hugging-face[/bold]
    it is the model of a configuration, and with [bold]--model[/bold] and [bold]--batches[/bold] any model of
    yours, both sharded over all GPUs: neither takes the sizes of a Llama, --tp and --pp.

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
        kind = _kind_of(given(context))
        planned: LlamaConfig | Model
        if kind == "--hugging-face":
            assert hugging_face is not None
            about, planned = _of_configuration(hugging_face, precision, microbatches, batch, seq, fuse)
        elif kind == "--model":
            about, planned = (
                str(model),
                _of_functions(str(model), str(batches), precision, gpus, microbatches),
            )
        else:
            sizes = {
                **{"layers": layers, "hidden": hidden, "ffn": ffn, "heads": heads},
                **{"kv_heads": kv_heads, "vocab": vocab, "seq": seq},
            }
            base = PRESETS[preset] if config is None else LlamaConfig.load(config)
            given_sizes = {name: size for name, size in sizes.items() if size is not None}
            about, planned = "", replace(base, **given_sizes)
        spread: dict[str, Any] = {"pp": pp, "tp": tp, "sequence_parallel": sequence_parallel}
        spread |= {"dp_replicate": dp_replicate, "dp_shard": dp_shard}
        job = Job(
            planned,
            Parallelism.over(gpus, **({} if search_layouts else spread)),
            batch=batch,
            microbatches=microbatches,
            precision=precision.dtypes(fp8_weights),
            recipe=precision.recipe,
            fuse_wgrad_accumulation=fusion.option,
            schedule=schedule,
            stages_per_rank=stages_per_rank,
            reshard_after_forward=zero == 3,
            grad_sync=grad_sync,
            checkpoint_layers=checkpoint_layers,
        )
        report: PlanReport | SearchReport
        try:
            if search_layouts:
                if global_batch is None:
                    raise ValueError("--search needs --global-batch, the sequences in a step of all ranks")
                found = search(job, hosts, global_batch=global_batch, count=top)
                report = SearchReport(job, hosts, global_batch, found)
            else:
                tracer = Tracer(hosts)
                result = plan_job(job, hosts, tracer)
                report = PlanReport(about, result, advise(result, tracer))
        except NotImplementedError as error:
            raise ValueError(str(error)) from error
    if as_json:
        print(report.json())
    else:
        report.show(results_console())
    raise typer.Exit(0 if report.fits else 1)


def _kind_of(given: Collection[str]) -> str | None:
    """The kind of model that the command line names, a key of `OPTIONS`; None for our Llama.

    Raises:
        ValueError: if the options name two kinds, or only half of one, or if one does not apply.
    """
    if "hugging_face" in given:
        kind = "--hugging-face"
    elif {"model", "batches"} & set(given):
        kind = "--model"
        if {"model", "batches"} - set(given):
            raise ValueError("--model and --batches go together: one builds the model, one yields batches")
    elif "fuse" in given:
        raise ValueError("--fuse needs --hugging-face, a configuration to apply it to")
    else:
        return None
    if useless := [name for name in given if name not in OPTIONS[kind]]:
        raise ValueError(f"--{useless[0].replace('_', '-')} does not apply with {kind}; leave it out")
    return kind


def _of_functions(model: str, batches: str, precision: PrecisionName, gpus: int, count: int) -> Model:
    """The model that one function builds, with the batches that another one yields.

    Raises:
        ValueError: if one of the functions does not exist.
    """
    build, yielded = function_named(model), function_named(batches)
    return Model(partial(with_own_layers, build, precision), list(islice(yielded(0, gpus), count)))


def _of_configuration(
    path: Path, precision: PrecisionName, count: int, batch: int, seq: int | None, fuse: bool
) -> tuple[str, Model]:
    """The model of a configuration of Hugging Face with random tokens, and both in words.

    Raises:
        ValueError: if it is not the configuration of a language model.
    """
    from flatfsdp.compat.transformers.from_config import FromConfig

    source = FromConfig.load(path, fused=fuse, fp8=precision.recipe is not None)
    build = source.build if fuse else partial(with_own_layers, source.build, precision)
    batches = list(source.batches(count, batch, seq or source.longest or 1024))
    shape = tuple(batches[0]["input_ids"].shape)
    about = f"{source.architecture}, {shape[0]} x {shape[1]} tokens a microbatch"
    return about, Model(build, batches)
