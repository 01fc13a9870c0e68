"""The commands and their options; each command's work is in a file of its own.

Exit codes: 0 success; 1 `verify` found a difference, a rank failed, or a plan does not fit;
2 the options are invalid.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, NoReturn

import typer

from flatfsdp.cli.console import given, reported_failures, results_console, usage_errors
from flatfsdp.cli.demo import demo
from flatfsdp.cli.matrix import matrix_plan
from flatfsdp.cli.needs import require
from flatfsdp.cli.plan import plan
from flatfsdp.cli.report import left_out_lines, plot_comparisons, table, verdict_lines
from flatfsdp.cli.verify import (
    OF_OWN_MODEL,
    OWN_SWITCHES,
    check_own_model,
    gpt_plan,
    run_plan,
    verify_own_model,
)
from flatfsdp.cli.world import world_plan, worlds_on_rank
from flatfsdp.comm.launch import Device, Launch, is_main, run_on_ranks
from flatfsdp.comm.paths import local_path
from flatfsdp.models.gpt import GPTConfig
from flatfsdp.parity import Parity, Switch
from flatfsdp.training import command_options
from flatfsdp.training.choices import Fusion, PrecisionName, Strategy
from flatfsdp.training.jobs import Settings

app = typer.Typer(
    help="FlatFSDP: proves that no switch changes a bit of a training, and plans what a training takes.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    # Its tracebacks print every local variable; a rank's plain traceback says more.
    pretty_exceptions_enable=False,
    add_completion=False,
)


@app.command()
def verify(
    context: typer.Context,
    precision: Annotated[
        list[PrecisionName],
        typer.Option(
            default_factory=lambda: [name for name in PrecisionName if name is not PrecisionName.fp8_block],
            show_default="all but fp8-block",
            help="Compute dtype and layers; repeat for several.",
        ),
    ],
    strategy: Annotated[
        list[Strategy],
        typer.Option(
            default_factory=lambda: [Strategy.zero2, Strategy.zero3],
            show_default="zero2 and zero3",
            help="dp: gradients all-reduced; zero2, zero3: sharded. Repeat for several.",
        ),
    ],
    switch: Annotated[
        list[Switch],
        typer.Option(
            default_factory=lambda: list(OWN_SWITCHES),
            show_default="all that apply",
            help="What to switch: the flag, in place or wrapped, resharding, fusion of weight gradients, "
            "caching or storage of FP8 weights, microbatches replayed as CUDA graphs (on GPUs), gradients "
            "reduced in every microbatch (of one a step).",
        ),
    ],
    fusion: Annotated[
        list[Fusion],
        typer.Option(
            default_factory=lambda: [Fusion.fused],
            show_default="fused",
            help="Weight gradients of our own layers where the flag is switched; repeat for several.",
        ),
    ],
    ranks: command_options.NumRanks = None,
    microbatches: command_options.Microbatches = 4,
    steps: command_options.Steps = 20,
    layers: command_options.Layers = 4,
    hidden: command_options.Hidden = 128,
    heads: command_options.Heads = 4,
    seq: command_options.Seq = 128,
    batch: command_options.Batch = 4,
    lr: command_options.LearningRate = 3e-3,
    seed: command_options.Seed = 0,
    data: command_options.Data = None,
    device: command_options.OnDevice = Device.auto,
    self_test: Annotated[
        bool,
        typer.Option(
            "--self-test",
            help="Damage one bit of a gradient, or exchange two lanes; verify must notice and exit 1.",
        ),
    ] = False,
    matrix: Annotated[
        bool,
        typer.Option(
            "--matrix",
            help="The flag over tensor, pipeline and data parallel ranks with a Llama; other sizes.",
        ),
    ] = False,
    only: Annotated[
        list[str] | None,
        typer.Option(help="With --matrix: rows whose name has this, such as 1f1b; repeat for several."),
    ] = None,
    world: Annotated[
        str | None,
        typer.Option(help="Compare numbers of ranks, such as 1,2,4, in place of switches; see --lanes."),
    ] = None,
    lanes: Annotated[
        int | None,
        typer.Option(
            min=1, help="With --world: lanes of a step; default: the least that all numbers divide."
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Verify your own model: package.module:build or file.py:build, with --batches."),
    ] = None,
    batches: Annotated[
        str | None, typer.Option(help="With --model: a function of rank and world size that yields batches.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for verify.json and losses.png.")] = Path("out/verify"),
    json: command_options.Json = False,
) -> None:
    """Prove that a switch changes no bit: train with it off and on, and compare.

    Switched are [bold]optimize_backward_concat[/bold], weight gradients fused into FP32 main_grad, the
    cache of FP8 weights, their storage in the flat buffers, and, on GPUs, microbatches that are replayed as
    CUDA graphs, with an evaluation, an exception, another shape and a load between the steps.
    Losses, reduced gradients of every step, final parameters and optimizer state are compared on every
    rank. Exits with 1 if anything differs. All gradients are kept in CPU memory for that.

    With [bold]--matrix[/bold] the rows are ways to share a Llama over 2 and 4 ranks on CPU, or over 8, 4 or 2
    GPUs. Sizes and steps that are left out are smaller there, and --precision, --strategy and --fusion choose
    rows.

    With [bold]--world[/bold] nothing is switched: the same steps are trained on several numbers of ranks,
    with the flag on and off, and compared with the first number's. --microbatches then counts those of all
    ranks.

    With [bold]--model[/bold] and [bold]--batches[/bold] it is a model of yours, in one --precision; of the
    other options, --switch, --ranks, --steps (4), --microbatches (2), --lr (1e-3), --seed, --device and
    --self-test apply.

    [bold]Examples[/bold]

    [green]python -m flatfsdp verify[/green]

    [green]python -m flatfsdp verify --model my_model.py:build --batches my_model.py:batches[/green]

    [green]python -m flatfsdp verify --precision bf16 --strategy dp --strategy zero3 --ranks 4[/green]

    [green]python -m flatfsdp verify --precision fp8-delayed --switch fusion --switch cache[/green]

    [green]torchrun --nproc-per-node 2 -m flatfsdp verify --switch replay --strategy zero3[/green]

    [green]python -m flatfsdp verify --self-test[/green]

    [green]torchrun --nproc-per-node 4 -m flatfsdp verify --json[/green]

    [green]python -m flatfsdp verify --matrix --only "pp 2" --precision fp8-delayed[/green]

    [green]torchrun --nproc-per-node 8 -m flatfsdp verify --matrix[/green]

    [green]python -m flatfsdp verify --world 1,2,4 --precision fp32 --strategy dp --strategy zero3[/green]
    """
    chosen = given(context)
    is_own = model is not None or batches is not None
    name, picture = "verify-model.json" if is_own else "verify-matrix.json", None
    if world is not None:
        name = "verify-world.json"
    elif not (is_own or matrix):
        require("matplotlib")
        name, picture = "verify.json", out / "losses.png"
    plan = worlds = None
    with usage_errors():
        if world is not None:
            if is_own:
                check_own_model({name: value for name, value in chosen.items() if name in OF_OWN_MODEL})
            settings = Settings(
                GPTConfig(layers, hidden, heads, seq), batch, microbatches, steps, lr, seed, data
            )
            worlds, launch = world_plan(world, lanes, device, precision, strategy, settings, chosen)
        elif lanes is not None:
            raise ValueError("--lanes goes with --world")
        elif is_own:
            check_own_model(chosen)
            launch = Launch(ranks, device, deterministic=True)
        elif matrix:
            plan = matrix_plan(device, ranks, chosen)
        elif only:
            raise ValueError("--only chooses among rows of --matrix; add it, or use --precision, --strategy")
        else:
            launch = Launch(ranks, device, deterministic=True)
            sizes = GPTConfig(layers, hidden, heads, seq)
            settings = Settings(sizes, batch, microbatches, steps, lr, seed, data)
            switches = switch if "switch" in chosen else None
            plan = gpt_plan(launch, settings, precision, strategy, switches, fusion, self_test=self_test)
        if plan is not None:
            # Here, so that no rank fails to.
            plan.rows[0].settings.sampler()
        local_path(out).mkdir(parents=True, exist_ok=True)
    with reported_failures():
        if worlds is not None:
            found = run_on_ranks(worlds_on_rank, (worlds, out / name), launch)
        elif plan is not None:
            found = run_plan(plan, out / name)
        else:
            found = run_on_ranks(verify_own_model, chosen, launch)
    conclude(found, out / name, json, picture)


def conclude(found: Parity, file: Path, json: bool, picture: Path | None) -> NoReturn:
    """Writes and prints the result of `verify`; ends with its exit code."""
    if is_main():
        file.write_text(found.json() + "\n")
        if picture is not None:
            plot_comparisons(picture, found)
        if json:
            print(found.json())
        else:
            console = results_console()
            console.print(table(found))
            for line in verdict_lines(found):
                console.print(line, style="green" if found.equal else "red", highlight=False)
            for line in left_out_lines(found):
                console.print(line, style="dim", highlight=False)
            written = " and ".join(str(path) for path in (file, picture) if path is not None)
            console.print(f"Wrote {written}.", highlight=False)
    raise typer.Exit(0 if found.equal else 1)


app.command()(plan)
app.command()(demo)
