"""Processes of ranks, their results, and files of results, for all benchmarks."""

from __future__ import annotations

import json
import pickle
import platform
import tempfile
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from flatfsdp.comm.launch import Device, Launch, Rank, start_and_join, under_torchrun
from lib.device import free_memory

RESULTS = Path(__file__).parents[1] / "results"
"""Folder of every benchmark's JSON and picture."""

LONGEST_MESSAGE = 600
"""Number of characters of an exception's message that a row of results keeps."""

Result = TypeVar("Result")


def progress_bar(*, visible: bool = True) -> Progress:
    """Makes a progress bar on stderr, so that stdout stays free for JSON."""
    return Progress(
        TextColumn("{task.description:<28}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        disable=not visible,
    )


def results_of_ranks(world_size: int, fn: Callable[..., Result], *args: object) -> list[Result]:
    """Returns the results of `fn(rank, world_size, *args)` on `world_size` gloo ranks, by rank.

    Each rank is a separate process with one thread and an initialised default group; `fn` is a top-level
    function of an importable module, and its results can be pickled.
    """
    with tempfile.TemporaryDirectory() as folder:
        start_and_join(_rank_main, world_size, world_size, folder, fn, args)
        return [pickle.loads((Path(folder) / f"{rank}.pickle").read_bytes()) for rank in range(world_size)]


def _rank_main(
    rank: int, world_size: int, folder: str, fn: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    # A file, not a port: concurrent benchmarks do not collide.
    store = dist.FileStore(f"{folder}/store", world_size)
    limit = timedelta(seconds=300)
    dist.init_process_group("gloo", timeout=limit, store=store, rank=rank, world_size=world_size)
    try:
        (Path(folder) / f"{rank}.pickle").write_bytes(pickle.dumps(fn(rank, world_size, *args)))
        dist.barrier()
    finally:
        dist.destroy_process_group()


def on_all_ranks(measure: Callable[[], Result], rank: Rank) -> list[Result] | str:
    """Each rank's measurement, or the error of the first one that failed; the same on all ranks."""
    try:
        mine: Result | str = measure()
    except Exception as error:  # the other figures are worth having
        mine = f"{type(error).__name__}: {error}".strip()[:LONGEST_MESSAGE]
        if rank.index == 0:
            traceback.print_exc()
    # Only after the exception and its frames are gone can all of a model be freed.
    free_memory(rank.device)
    everyones: list[Any] = [None] * rank.world
    dist.all_gather_object(everyones, mine)
    failures = (f"rank {index}: {found}" for index, found in enumerate(everyones) if isinstance(found, str))
    return next(failures, everyones)


def environment(device: str = "cpu") -> dict[str, str]:
    """The environment of the numbers, without dates and host names, so that reruns compare equal."""
    name = torch.cuda.get_device_name() if device == "cuda" else platform.machine()
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    return {**versions, **_peers(), "device": device, "name": name}


def _peers() -> dict[str, str]:
    """Versions of installed packages that are measured or used besides torch."""
    found = {}
    packages = ("torchao", "fairscale", "transformer_engine", "nvmath-python", "transformers", "liger-kernel")
    for package in packages:
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def launch_of(ranks: int, device: Device) -> Launch:
    """Settings of the requested number of ranks, or of those that torchrun has started.

    Raises:
        typer.BadParameter: if they cannot run there.
    """
    try:
        return Launch(None if under_torchrun() else ranks, device)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def write(payload: object, out: Path, name: str, draw: Callable[[Path], object]) -> str:
    """Writes `name`.json and, by `draw`, `name`.png to the folder `out`; returns the JSON."""
    out.mkdir(parents=True, exist_ok=True)
    text = json.dumps(payload, indent=2)
    (out / f"{name}.json").write_text(text + "\n")
    draw(out / f"{name}.png")
    return text


def publish(
    payload: dict[str, Any],
    out: Path,
    name: str,
    *,
    draw: Callable[[Path], object],
    show: Callable[[], object],
    as_json: bool,
) -> None:
    """Writes the files as `write` does, and prints a table, by `show`, or the JSON."""
    text = write(payload, out, name, draw)
    if as_json:
        typer.echo(text)
    else:
        show()
        typer.echo(f"Written: {name}.json, {name}.png in {out.name}/")
