"""Time of saving and loading a sharded model, beside plain torch.distributed.checkpoint.

A Llama and its AdamW (12 bytes per parameter) are sharded over all ranks, each of which writes and reads its
part. All ways are measured in turns, on the same tensors with random values:

    FlatFSDP    `checkpoint.save` and `load`: a digest of every file is written and verified
    unverified  `load` with verify=False
    no digests  `checkpoint.save` with digests=False
    plain       `dcp.save` and `dcp.load` of `sharded_training_state`
    background  `CheckpointManager(async_save=True).save`, until it returns; its first save takes longer, as
                it makes host memory for the copy

As in a restarted run, the optimizer has no state before loading.  Plain DCP fills tensors, so they are made
first, within the measured time.

A time is that of the slowest rank, between barriers, with files synced; every save goes to a new folder.  If
memory is large enough, files just written are read from the page cache, so reading is compared at its
fastest, where digests cost most.  After each load, parameters are compared bit for bit with the saved ones.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import typer
from lib import options
from lib.common import RESULTS, environment, launch_of, progress_bar, publish
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from torch import Tensor

from flatfsdp import checkpoint
from flatfsdp.comm.launch import Device, Rank, is_main, run_on_ranks
from flatfsdp.models import PRESETS, LlamaPipeline
from flatfsdp.models.config import PresetName
from flatfsdp.optim import AdamW
from flatfsdp.parallel import make_mesh

OURS, UNVERIFIED, PLAIN = "FlatFSDP", "FlatFSDP, unverified", "plain DCP"
NO_DIGESTS, BACKGROUND = "FlatFSDP, no digests", "FlatFSDP, in the background"


@dataclass(frozen=True)
class Job:
    """The settings of a measurement.

    Attributes:
        preset: sizes of the Llama.
        rounds: number of times that everything is measured.
        folder: where checkpoints are written and removed; rank 0's is used.
    """

    preset: PresetName
    rounds: int
    folder: str


@dataclass(frozen=True)
class Report:
    """The results, on rank 0.

    Attributes:
        parameters: number of parameters of the whole model.
        bytes: size of one checkpoint on disk.
        save_s, load_s: seconds of each round, by way.
    """

    parameters: int
    bytes: int
    save_s: dict[str, list[float]]
    load_s: dict[str, list[float]]


class Trained:
    """A model and an optimizer with complete state, filled with random numbers."""

    def __init__(self, job: Job, rank: Rank) -> None:
        sizes = PRESETS[job.preset]
        self.model = LlamaPipeline(sizes, make_mesh(), "1f1b", microbatches=1, batch=1, device=rank.device)
        self.parameters: list[Tensor] = [each for stage in self.model.stages for each in stage.parameters()]
        self.optimizer = AdamW(self.parameters, lr=1e-3)
        for parameter in self.parameters:
            parameter.grad = torch.randn_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.manager: checkpoint.CheckpointManager | None = None
        self.step = 0

    def save(self, folder: Path, digests: bool = True) -> None:
        """Saves with `flatfsdp.checkpoint`."""
        checkpoint.save(folder, self.model.stages, self.optimizer, digests=digests)

    def save_in_background(self, folder: Path) -> None:
        """Begins to save with a manager, whose folder has the name of the first one."""
        if self.manager is None:
            self.manager = checkpoint.CheckpointManager(folder, keep=1, async_save=True)
        self.step += 1
        self.manager.save(self.step, self.model.stages, self.optimizer)

    @torch.no_grad()
    def forget(self) -> dict[Tensor, dict[str, Tensor]]:
        """Sets weights to NaN, and removes and returns the optimizer's state."""
        for parameter in self.parameters:
            parameter.fill_(torch.nan)
        state = dict(self.optimizer.state)
        self.optimizer.state.clear()
        return state

    def load(self, folder: Path, verify: bool = True) -> None:
        """Forgets everything, and loads with `flatfsdp.checkpoint`."""
        self.forget()
        checkpoint.load(folder, self.model.stages, self.optimizer, verify=verify)

    def plain_save(self, folder: Path) -> None:
        """Saves with plain DCP."""
        dcp.save(self._state(), checkpoint_id=folder)

    def plain_load(self, folder: Path) -> None:
        """Forgets everything, makes the tensors to fill, and loads with plain DCP."""
        for parameter, state in self.forget().items():
            self.optimizer.state[parameter] = {key: torch.zeros_like(value) for key, value in state.items()}
        dcp.load(
            self._state(),
            checkpoint_id=folder,
            planner=dcp.DefaultLoadPlanner(flatten_sharded_tensors=False),
        )

    def _state(self) -> dict[str, Any]:
        return checkpoint.sharded_training_state(self.model.stages, self.optimizer)


def measure(rank: Rank, job: Job) -> Report:
    """Times every way of saving and loading in each round."""
    trained = Trained(job, rank)
    # Under torchrun, each rank has made its own folder.
    shared = [job.folder]
    dist.broadcast_object_list(shared, src=0)
    saved = [parameter.detach().clone() for parameter in trained.parameters]
    saves: dict[str, Callable[[Path], None]] = {
        OURS: trained.save,
        NO_DIGESTS: partial(trained.save, digests=False),
        PLAIN: trained.plain_save,
        BACKGROUND: trained.save_in_background,
    }
    loads: dict[str, Callable[[Path], None]] = {
        OURS: trained.load,
        UNVERIFIED: partial(trained.load, verify=False),
        PLAIN: trained.plain_load,
    }
    save_s: dict[str, list[float]] = {name: [] for name in saves}
    load_s: dict[str, list[float]] = {name: [] for name in loads}
    with progress_bar(visible=rank.index == 0) as bar:
        task = bar.add_task("", total=job.rounds * (len(saves) + len(loads)))

        def begin(what: str) -> None:
            bar.update(task, description=what)
            if rank.index == 0 and not bar.console.is_terminal:
                # In a file the bar appears at the end alone, and never if the run is stopped before.
                bar.console.print(
                    f"{bar.tasks[task].completed:.0f} of {bar.tasks[task].total:.0f} done; {what}"
                )

        # A process's first save takes twice as long as the next: whoever went first would seem slow.
        begin("a save before the measured ones")
        warm_up = Path(shared[0]) / "warm-up"
        trained.plain_save(warm_up)
        dist.barrier()
        if rank.index == 0:
            shutil.rmtree(warm_up, ignore_errors=True)
        for number in range(job.rounds):
            folders = {name: Path(shared[0]) / f"{number}-{index}" for index, name in enumerate(saves)}
            for name, save in saves.items():
                begin(f"save: {name}")
                save_s[name].append(_seconds(partial(save, folders[name]), rank))
                if trained.manager is not None:
                    trained.manager.wait()
                bar.advance(task)
            for name, load in loads.items():
                begin(f"load: {name}")
                source = folders[PLAIN if name == PLAIN else OURS]
                load_s[name].append(_seconds(partial(load, source), rank))
                _check(trained.parameters, saved, name)
                bar.advance(task)
            size = sum(file.stat().st_size for file in folders[OURS].iterdir())
            dist.barrier()
            if rank.index == 0:
                for folder in folders.values():
                    shutil.rmtree(folder, ignore_errors=True)
    return Report(_summed(saved, rank), size, save_s, load_s)


def _summed(shards: list[Tensor], rank: Rank) -> int:
    count = torch.tensor(sum(shard.numel() for shard in shards), device=rank.device)
    dist.all_reduce(count)
    return int(count)


def _check(parameters: list[Tensor], saved: list[Tensor], name: str) -> None:
    """Compares parameters with the saved ones.

    Raises:
        RuntimeError: if a load has not restored them.
    """
    for parameter, before in zip(parameters, saved, strict=True):
        if not torch.equal(parameter, before):
            raise RuntimeError(f"{name} has loaded other numbers than were saved")


def _seconds(action: Callable[[], object], rank: Rank) -> float:
    """Seconds that the slowest rank takes."""
    if rank.device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()
    start = time.perf_counter()
    action()
    if rank.device.type == "cuda":
        torch.cuda.synchronize()
    seconds = torch.tensor(time.perf_counter() - start, device=rank.device)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return float(seconds)


def rows_of(report: Report) -> list[dict[str, Any]]:
    """One row per action and way; `ratio` is relative to plain DCP in the same rounds."""
    rows = []
    for action, found in (("save", report.save_s), ("load", report.load_s)):
        for name, seconds in found.items():
            ratios = [own / plain for own, plain in zip(seconds, found[PLAIN], strict=True)]
            rows.append(
                {
                    "action": action,
                    "name": name,
                    "seconds": statistics.median(seconds),
                    "gb_s": report.bytes / statistics.median(seconds) / 1e9,
                    "ratio": statistics.median(ratios),
                    "seconds_of_each_round": seconds,
                }
            )
    return rows


def _title(payload: dict[str, Any]) -> str:
    return (
        f"A Llama of {payload['parameters'] / 1e9:.2g} billion parameters and its AdamW, "
        f"{payload['bytes'] / 1e9:.1f} GB, on {payload['ranks']} ranks"
    )


def show(payload: dict[str, Any]) -> None:
    table = Table(title=f"\n{_title(payload)}", title_justify="left", box=None, padding=(0, 0, 0, 2))
    for column in ("", "", "seconds", "GB/s", "of plain DCP"):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    for row in payload["rows"]:
        table.add_row(
            row["action"], row["name"], f"{row['seconds']:.2f}", f"{row['gb_s']:.2f}", f"{row['ratio']:.3f}"
        )
    Console(width=100).print(table)


def draw(payload: dict[str, Any], path: Path) -> None:
    """Draws one bar for each row."""
    rows = payload["rows"][::-1]
    figure = Figure(figsize=(8, 1.2 + 0.4 * len(rows)), layout="constrained")
    axis = figure.subplots()
    colors = ["#bab0ac" if row["name"] == PLAIN else "#4e79a7" for row in rows]
    labels = [f"{row['action']}: {row['name']}" for row in rows]
    bars = axis.barh(labels, [row["seconds"] for row in rows], color=colors)
    axis.bar_label(bars, [f"{row['ratio']:.2f}" for row in rows], padding=3)
    axis.set_xlabel("seconds; beside the bar: time relative to plain DCP")
    axis.set_title(_title(payload), loc="left", fontsize=10)
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


app = typer.Typer(add_completion=False, rich_markup_mode="markdown")


@app.command(
    help="Seconds to save and to load a sharded model, beside plain torch.distributed.checkpoint.",
    epilog="""Examples:

    torchrun --nproc-per-node 4 benchmarks/checkpoint.py

    python benchmarks/checkpoint.py --device cpu --ranks 4 --preset debug --rounds 5

    python benchmarks/checkpoint.py --device cpu --preset tiny --json""",
)
def main(
    preset: Annotated[PresetName, typer.Option(help="Sizes of the Llama.")] = "1b",
    rounds: Annotated[int, typer.Option(min=1, help="Times to measure everything, by turns.")] = 3,
    folder: Annotated[
        Path | None,
        typer.Option(
            help="Where to write checkpoints; made if it does not exist.",
            show_default="a new one where temporary files go",
        ),
    ] = None,
    device: options.OnDevice = Device.auto,
    ranks: options.RanksToStart = 2,
    out: options.Out = RESULTS,
    as_json: options.Json = False,
) -> None:
    launch = launch_of(ranks, device)
    kind = "cuda" if launch.use_cuda() else "cpu"
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="checkpoints-", dir=folder) as own:
        report = run_on_ranks(measure, Job(preset, rounds, own), launch)
    if is_main():
        payload = {
            "environment": environment(kind),
            "preset": preset,
            "ranks": launch.world,
            "rounds": rounds,
            "parameters": report.parameters,
            "bytes": report.bytes,
            "rows": rows_of(report),
        }
        name = f"checkpoint-{preset}-{launch.world}{'' if kind == 'cuda' else '-cpu'}"
        publish(payload, out, name, draw=partial(draw, payload), show=partial(show, payload), as_json=as_json)


if __name__ == "__main__":
    app()
