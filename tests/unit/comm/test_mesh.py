"""Places of ranks in a mesh; with a fake process group, one process is any rank of any world."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch.distributed as dist
from rich.console import Console

from flatfsdp.parallel import ParallelMesh, make_mesh


@contextmanager
def world(size: int, rank: int = 0) -> Iterator[None]:
    dist.init_process_group("fake", rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def ranks_of(group: dist.ProcessGroup) -> list[int]:
    return dist.get_process_group_ranks(group)


def groups(mesh: ParallelMesh) -> dict[str, list[int]]:
    return {
        "tp": ranks_of(mesh.tp_group),
        "dp": ranks_of(mesh.dp_group),
        "pp": ranks_of(mesh.pp_group),
        "stage": ranks_of(mesh.stage_group),
        **{name: ranks_of(mesh.dp.get_group(name)) for name in mesh.dp.mesh_dim_names},
    }


def test_tp_is_innermost_and_pp_outermost() -> None:
    with world(16, rank=13):
        mesh = make_mesh(pp=2, dp_replicate=2, dp_shard=2, tp=2)
        assert groups(mesh) == {
            "tp": [12, 13],
            "dp_shard": [13, 15],
            "dp_replicate": [9, 13],
            "dp": [9, 11, 13, 15],
            "pp": [5, 13],
            "stage": list(range(8, 16)),
        }
        assert (mesh.pp_rank, mesh.dp_rank, mesh.tp_rank) == (1, 2, 1)
        assert (mesh.pp_size, mesh.dp_size, mesh.tp_size) == (2, 4, 2)
        assert mesh.dp.mesh_dim_names == ("dp_replicate", "dp_shard")


@pytest.mark.parametrize("rank", range(8))
def test_without_replicas_each_rank_has_one_dimension_of_shards(rank: int) -> None:
    with world(8, rank):
        mesh = make_mesh(pp=2, tp=2)
        stage, shard, part = rank // 4, rank // 2 % 2, rank % 2
        assert groups(mesh) == {
            "tp": [rank - part, rank - part + 1],
            "dp_shard": [4 * stage + part, 4 * stage + part + 2],
            "dp": [4 * stage + part, 4 * stage + part + 2],
            "pp": [rank % 4, rank % 4 + 4],
            "stage": list(range(4 * stage, 4 * stage + 4)),
        }
        assert (mesh.pp_rank, mesh.dp_rank, mesh.tp_rank) == (stage, shard, part)


def test_dp_shard_fills_what_is_left() -> None:
    with world(1):
        mesh = make_mesh()
        assert set(map(tuple, groups(mesh).values())) == {(0,)}
        assert str(mesh) == "1 ranks: no parallelism"
    with world(24):
        assert make_mesh(dp_replicate=2, tp=4).dp.mesh.shape == (2, 3)
        assert make_mesh(dp_shard=24).dp_size == 24


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"pp": 2, "dp_shard": 3, "tp": 2}, r"pp 2 x dp_shard 3 x tp 2 needs 12 ranks, and there are 8"),
        ({"dp_shard": 1, "tp": 2}, r"tp 2 needs 2 ranks, and there are 8; leave dp_shard out"),
        ({"pp": 3, "tp": 2}, r"pp 3 x dp_shard \? x tp 2 needs a multiple of 6 ranks, and there are 8"),
        ({"tp": 0}, r"tp is 0; it has to be at least 1$"),
        ({"pp": -1}, r"pp is -1; it has to be at least 1$"),
        ({"dp_shard": -2}, r"dp_shard is -2; .* or -1 for all ranks"),
    ],
)
def test_sizes_that_do_not_fit(sizes: dict[str, Any], message: str) -> None:
    with world(8), pytest.raises(ValueError, match=message):
        make_mesh(**sizes)


def test_without_torch_distributed() -> None:
    with pytest.raises(RuntimeError, match="init_process_group"):
        make_mesh(tp=2)


@pytest.mark.parametrize(
    ("sizes", "name", "rows"),
    [
        (
            {"pp": 2, "tp": 4},
            "16 ranks: pp 2 x dp_shard 2 x tp 4",
            ["dp_shard 0 0-3 8-11", "dp_shard 1 4-7 12-15"],
        ),
        (
            {"dp_replicate": 2, "tp": 8},
            "16 ranks: dp_replicate 2 x tp 8",
            ["dp_replicate 0, dp_shard 0 0-7", "dp_replicate 1, dp_shard 0 8-15"],
        ),
        (
            {"pp": 8, "dp_shard": 2},
            "16 ranks: pp 8 x dp_shard 2",
            ["dp_shard 0 0 2 4 6 8 10 12 14", "dp_shard 1 1 3 5 7 9 11 13 15"],
        ),
    ],
)
def test_the_table_says_where_ranks_are(sizes: dict[str, int], name: str, rows: list[str]) -> None:
    with world(16):
        mesh = make_mesh(**sizes)
    console = Console(width=120)
    with console.capture() as capture:
        console.print(mesh.table())
    lines = [" ".join(line.split()) for line in capture.get().splitlines()]
    found = [line for line in lines if line.startswith("dp_")]
    assert str(mesh) == name
    assert found == rows
