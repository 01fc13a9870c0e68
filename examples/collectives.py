"""The effect of each collective operation on the tensors of four ranks, and the parts of all-reduce.

python examples/collectives.py                          # four processes on the CPU (or on four GPUs)
torchrun --nproc-per-node 3 examples/collectives.py     # any other number of ranks
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor

from flatfsdp.comm.launch import Launch, Rank, is_main, run_on_ranks, under_torchrun

# ---- the operations: this rank's tensor in, this rank's result out (None if it gets none) ----------------


def broadcast(mine: Tensor, rank: Rank) -> Tensor:
    """Everyone gets rank 0's tensor."""
    result = mine.clone()
    dist.broadcast(result, src=0)
    return result


def scatter(mine: Tensor, rank: Rank) -> Tensor:
    """Rank 0's tensor is split into shards; rank r gets shard r."""
    shard = mine.new_empty(len(mine) // rank.world)
    dist.scatter(shard, list(mine.chunk(rank.world)) if rank.index == 0 else None, src=0)
    return shard


def gather(mine: Tensor, rank: Rank) -> Tensor | None:
    """Rank 0 gets everyone's tensors, concatenated."""
    parts = [torch.empty_like(mine) for _ in range(rank.world)] if rank.index == 0 else None
    dist.gather(mine, parts, dst=0)
    return None if parts is None else torch.cat(parts)


def all_gather(mine: Tensor, rank: Rank) -> Tensor:
    """Everyone gets everyone's tensors, concatenated: how FSDP assembles a layer's parameters."""
    parts = [torch.empty_like(mine) for _ in range(rank.world)]
    dist.all_gather(parts, mine)
    return torch.cat(parts)


def reduce_scatter(mine: Tensor, rank: Rank) -> Tensor:
    """The tensors are summed; rank r gets shard r of the sum: what FSDP does with a layer's gradients."""
    shard = mine.new_empty(len(mine) // rank.world)
    dist.reduce_scatter(shard, list(mine.chunk(rank.world)))
    return shard


def all_reduce(mine: Tensor, rank: Rank) -> Tensor:
    """The tensors are summed; everyone gets the whole sum: what plain data parallel does with gradients."""
    total = mine.clone()
    dist.all_reduce(total)
    return total


# ---- what happens on each rank ---------------------------------------------------------------------------

Shown = dict[str, list[str]]
"""Title of a row -> each rank's tensor, by rank."""


def run_all(rank: Rank, _: None) -> list[tuple[str, Shown]]:
    """Runs every operation in turn; returns a heading and the rows of a table for each."""
    whole = torch.arange(rank.world, device=rank.device) + 10 * (rank.index + 1)  # rank 1: 20 21 22 23
    one = whole[:1]
    inputs = {
        broadcast: whole,
        scatter: whole,
        gather: one,
        all_gather: one,
        reduce_scatter: whole,
        all_reduce: whole,
    }
    tables = [before_and_after(operation, mine, rank) for operation, mine in inputs.items()]
    return [*tables, two_halves(whole, rank)]


def before_and_after(
    operation: Callable[[Tensor, Rank], Tensor | None], mine: Tensor, rank: Rank
) -> tuple[str, Shown]:
    heading = f"{operation.__name__.replace('_', '-')}: {operation.__doc__}"
    return heading, {"before": everyones(mine, rank), "after": everyones(operation(mine, rank), rank)}


def two_halves(mine: Tensor, rank: Rank) -> tuple[str, Shown]:
    """All-reduce is a reduce-scatter followed by an all-gather of its result.

    Each half sends (N - 1) / N of the tensor, and all-reduce twice that.  So sharding gradients and optimizer
    state (ZeRO-2) costs no more traffic than plain data parallel.
    """
    shard = reduce_scatter(mine, rank)
    rebuilt = all_gather(shard, rank)
    total = all_reduce(mine, rank)
    # Integers, whose sums do not depend on the order of the additions.
    assert torch.equal(rebuilt, total), f"rank {rank.index}: {rebuilt.tolist()} is not {total.tolist()}"
    return "all-reduce = reduce-scatter + all-gather", {
        "before": everyones(mine, rank),
        "reduce-scatter": everyones(shard, rank),
        "then all-gather": everyones(rebuilt, rank),
        "all-reduce": everyones(total, rank),
    }


def everyones(mine: Tensor | None, rank: Rank) -> list[str]:
    """Each rank's tensor as text, by rank."""
    texts = [""] * rank.world
    dist.all_gather_object(texts, "-" if mine is None else " ".join(map(str, mine.tolist())))
    return texts


# ---- what is shown ---------------------------------------------------------------------------------------


def print_table(console: Console, heading: str, rows: Shown) -> None:
    table = Table(box=None, padding=(0, 3, 0, 0))
    table.add_column("")
    for index in range(len(rows["before"])):
        table.add_column(f"rank {index}", style="cyan", no_wrap=True)
    for title, texts in rows.items():
        table.add_row(title, *texts)
    console.print(f"[bold]{heading}[/]", table, "", sep="\n")


def main() -> None:
    launch = Launch(None if under_torchrun() else 4)
    tables = run_on_ranks(run_all, None, launch)
    if is_main():
        console = Console()
        console.width = max(console.width, 120)  # a table that wraps says nothing
        for heading, rows in tables:
            print_table(console, heading, rows)
        console.print(f"The last two rows are equal on each of {launch.world} ranks.", style="green")


if __name__ == "__main__":
    main()
