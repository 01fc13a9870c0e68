"""One model, four ways to spread it over four ranks: the same losses, different memory, different traffic.

    data parallel   every rank holds everything; gradients are all-reduced
    ZeRO-2          optimizer state and reduced gradients are sharded; parameters are gathered once a step
    ZeRO-3          parameters, too: a layer is gathered for its forward and again for its backward
    hybrid          ZeRO-3 inside groups of ranks (a host, for example), and data parallel between the groups

python examples/data_parallel.py
python examples/data_parallel.py --layers 6 --hidden 256 --steps 20 --json
torchrun --nproc-per-node 4 examples/data_parallel.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Annotated, Any
from weakref import WeakSet

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, UntypedStorage, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from flatfsdp import FlatFSDP, auto_wrap, by_class
from flatfsdp.comm.launch import Device, Launch, Rank, is_main, run_on_ranks, under_torchrun
from flatfsdp.models.gpt import GPT, Block, GPTConfig
from flatfsdp.models.text import Sampler, load_corpus
from flatfsdp.profiling.step_time import environment, to_json
from flatfsdp.training import command_options

GROUPS = 2
"""Number of groups of the hybrid."""

TOLERANCE = 1e-5
"""Relative, between the losses of two ways: they add the same FP32 numbers in different orders."""


def ways(rank: Rank) -> dict[str, dict[str, Any]]:
    """The differences between the ways: options of `auto_wrap`."""
    shape = (GROUPS, rank.world // GROUPS)
    mesh = init_device_mesh(rank.device.type, shape, mesh_dim_names=("replicate", "shard"))
    whole = init_device_mesh(rank.device.type, (rank.world, 1), mesh_dim_names=("replicate", "shard"))
    return {
        "data parallel": {"mesh": whole},
        "ZeRO-2": {"reshard_after_forward": False},
        "ZeRO-3": {"reshard_after_forward": True},
        f"hybrid {shape[0]} x {shape[1]}": {"reshard_after_forward": True, "mesh": mesh},
    }


@dataclass(frozen=True)
class Settings:
    """The settings of all ways."""

    model: GPTConfig
    batch: int
    steps: int
    lr: float
    seed: int


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank, without activations, and without weight gradients that are not yet in a flat buffer.

    Attributes:
        parameters: FP32 shards, which the optimizer updates.
        gradients: reduced ones, from the end of the backward to `zero_grad`.
        optimizer: AdamW's two moments, and a step count for each unit.
        gathered: whole units' parameters beside the shards.
        unreduced: whole units' gradients, waiting to be reduced or being reduced.  Both of these are from the
            moment of the step when their sum is largest.
    """

    parameters: int
    gradients: int
    optimizer: int
    gathered: int
    unreduced: int

    @property
    def total(self) -> int:
        """An upper bound: while whole units exist, some reduced gradients do not exist yet."""
        return sum(vars(self).values())


@dataclass(frozen=True)
class TrainedWay:
    """One way: mean losses of all steps, and bytes that one rank sends per parameter in a step."""

    name: str
    losses: list[float]
    memory: Memory
    wire: dict[str, float]


# ---- on every rank ---------------------------------------------------------------------------------------


def train_all(rank: Rank, settings: Settings) -> dict[str, Any]:
    """Trains the same model on the same data in each way."""
    text = Sampler(load_corpus(None), settings.batch, settings.model.seq, settings.seed)
    rows = [train(name, chosen, rank, settings, text) for name, chosen in ways(rank).items()]
    parameters = sum(parameter.numel() for parameter in GPT(settings.model).parameters())
    return {"environment": environment(rank), "parameters": parameters, "rows": rows}


def train(name: str, chosen: dict[str, Any], rank: Rank, settings: Settings, text: Sampler) -> TrainedWay:
    plain = GPT(settings.model, settings.seed)
    one_of_each_unit = [next(module.parameters()) for module in (plain, *plain.blocks)]
    model = auto_wrap(plain, by_class(Block), device=rank.device, optimize_backward_concat=True, **chosen)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr)
    buffers = UnitBuffers(one_of_each_unit, model.parameters())
    losses: list[float] = []
    for step in range(settings.steps):
        tokens, targets = (tensor.to(rank.device) for tensor in text.sample(step, 0, rank.index))
        # One step's memory is enough, and inspecting every operator takes time.
        with buffers if step == settings.steps - 1 else nullcontext():
            optimizer.zero_grad()
            model.fsdp_state.shared.ledger.reset()
            loss = model(tokens, targets)
            loss.backward()
            optimizer.step()
        losses.append(mean_over_ranks(loss))
    wire = model.fsdp_state.shared.ledger.bytes_per_parameter()
    return TrainedWay(
        name,
        losses,
        memory_of(model, optimizer, buffers),
        {kind: wire.get(kind, 0.0) for kind in ("gather", "reduce", "all_reduce")},
    )


def mean_over_ranks(loss: Tensor) -> float:
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def memory_of(model: FlatFSDP, optimizer: torch.optim.Optimizer, buffers: UnitBuffers) -> Memory:
    """The memory after the optimizer's step, with the gradients still there."""
    shards = list(model.parameters())
    gradients = {shard.grad.untyped_storage() for shard in shards if shard.grad is not None}
    state = [value for entry in optimizer.state.values() for value in entry.values()]
    # Data parallel reduces a buffer in place, which then is the gradient: counted once.
    counted = nbytes(storage for storage in gradients if storage in buffers.gradients)
    return Memory(
        parameters=sum(shard.nbytes for shard in shards),
        gradients=nbytes(gradients),
        optimizer=sum(value.nbytes for value in state if isinstance(value, Tensor)),
        gathered=buffers.peak[0],
        unreduced=buffers.peak[1] - counted,
    )


def nbytes(storages: Iterable[UntypedStorage]) -> int:
    return sum(storage.nbytes() for storage in storages)


class UnitBuffers(TorchDispatchMode):
    """Tracks, at every operator, the memory of the flat buffers of whole units.

    It finds them through parameters: while a unit is gathered, each one is a view of the unit's buffer, and
    while gradients land, its `main_grad` is a view of another.  A buffer is followed until it is freed.

    Args:
        parameters: one of each unit.
        shards: tensors that the optimizer updates; without sharding they are the units' buffers themselves,
            and not counted here.

    Attributes:
        gradients: gradient buffers that exist now.
        peak: bytes of parameter buffers and of gradient buffers when their sum was largest.
    """

    def __init__(self, parameters: list[nn.Parameter], shards: Iterable[Tensor]) -> None:
        super().__init__()
        self._parameters = parameters
        self._shards = {shard.untyped_storage() for shard in shards}
        self._gathered: WeakSet[UntypedStorage] = WeakSet()
        self.gradients: WeakSet[UntypedStorage] = WeakSet()
        self.peak = (0, 0)

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self._look()
        return result

    def _look(self) -> None:
        for parameter in self._parameters:
            storage = parameter.untyped_storage()
            # A sharded parameter is a NaN in the memory of one element.
            if storage.nbytes() >= parameter.nbytes and storage not in self._shards:
                self._gathered.add(storage)
            gradient = getattr(parameter, "main_grad", None)
            if gradient is not None:
                self.gradients.add(gradient.untyped_storage())
        now = (nbytes(self._gathered), nbytes(self.gradients))
        self.peak = max(self.peak, now, key=sum)


# ---- what is shown ---------------------------------------------------------------------------------------


def largest_difference(rows: list[TrainedWay]) -> float:
    """Largest relative difference between the losses of any way and the first one's in the same step."""
    first, *others = rows
    return max(
        abs(theirs - ours) / abs(ours)
        for other in others
        for theirs, ours in zip(other.losses, first.losses, strict=True)
    )


def show(rows: list[TrainedWay], parameters: int) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("", no_wrap=True)
    for column in ("first\nloss", "last\nloss"):
        table.add_column(column, justify="right")
    for column in (
        "para-\nmeters",
        "gra-\ndients",
        "opti-\nmizer",
        "+ gath-\nered",
        "+ unre-\nduced",
        "MiB at\nmost",
    ):
        table.add_column(column, justify="right", style="cyan")
    for column in ("sent to\ngather", "reduce-\nscatter", "all-\nreduce"):
        table.add_column(column, justify="right", style="magenta")
    for row in rows:
        table.add_row(
            row.name,
            *(f"{loss:.6f}" for loss in (row.losses[0], row.losses[-1])),
            *(f"{size / 2**20:.2f}" for size in (*vars(row.memory).values(), row.memory.total)),
            *(f"{sent:.2f}" for sent in row.wire.values()),
        )
    console = Console()
    console.width = max(console.width, 110)  # a table that wraps says nothing
    console.print(
        f"[bold]{parameters:,} parameters in FP32; memory and traffic of one rank[/]\n",
        table,
        "\nMemory in MiB; + marks whole units, at the moment of a step when there are most of them.",
        "Traffic in bytes per parameter and step.",
        sep="\n",
        highlight=False,
    )


def main(
    ranks: Annotated[int, typer.Option(help="Processes to start; torchrun starts its own.")] = 4,
    steps: command_options.Steps = 10,
    layers: command_options.Layers = 12,
    hidden: command_options.Hidden = 64,
    heads: command_options.Heads = 4,
    seq: command_options.Seq = 64,
    batch: command_options.Batch = 4,
    lr: command_options.LearningRate = 3e-3,
    seed: command_options.Seed = 0,
    device: command_options.OnDevice = Device.auto,
    as_json: command_options.Json = False,
) -> None:
    """Trains one small GPT by data parallel, ZeRO-2, ZeRO-3 and hybrid sharding, and compares them.

    For example:

    python examples/data_parallel.py --layers 6 --hidden 256 --steps 20 --json

    torchrun --nproc-per-node 4 examples/data_parallel.py
    """
    try:
        settings = Settings(GPTConfig(layers, hidden, heads, seq), batch, steps, lr, seed)
        launch = Launch(None if under_torchrun() else ranks, device)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if launch.world < 2 * GROUPS or launch.world % GROUPS:
        raise typer.BadParameter(
            f"the hybrid needs {GROUPS} equal groups of at least 2 ranks, which {launch.world} do not make; "
            "start 4"
        )
    found = run_on_ranks(train_all, settings, launch)
    if is_main():
        rows = found["rows"]
        difference = largest_difference(rows)
        if as_json:
            described = [{**asdict(row), "memory_total": row.memory.total} for row in rows]
            payload = {**found, "settings": asdict(settings), "rows": described}
            typer.echo(to_json({**payload, "largest_loss_difference": difference}, indent=2))
        else:
            show(rows, found["parameters"])
            typer.echo(f"Losses of all steps agree within {difference:.1e}, relative.")
        assert difference <= TOLERANCE, f"losses differ by {difference:.1e}, more than FP32 rounding explains"


if __name__ == "__main__":
    typer.run(main)
