"""Local shards: this rank's part of each parameter as a parameter of its own."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import nn

from flatfsdp.comm.grid import Grid
from flatfsdp.comm.ranks import ALONE, Ranks
from flatfsdp.contract.main_grad import MAIN_GRAD
from flatfsdp.contract.tensor_parallel import SEQUENCE_PARALLEL
from flatfsdp.contract.whole_shape import whole_shape
from flatfsdp.engine.storage.master import LocalShard, MasterShard
from flatfsdp.engine.storage.state import Shared, UnitMember
from flatfsdp.flat.layout import FlatLayout, ParamSpec
from flatfsdp.options import Policy, Precision

SHAPES = {"norm": (13,), "weight": (7, 5), "bias": (5,), "scale": (), "none": (0, 3)}


def originals() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES.values()]


def shard_of(rank: int, size: int, parameters: list[nn.Parameter]) -> MasterShard:
    layout = FlatLayout.pack(ParamSpec(name, shape) for name, shape in SHAPES.items())
    grid = Grid(Ranks(None, size, rank), ALONE)
    unit = UnitMember(Policy(Precision()), grid, Shared(torch.device("cpu")))
    return MasterShard(layout, unit, parameters, lists_flat=False)


def local_shards_of(rank: int, size: int) -> tuple[MasterShard, Sequence[LocalShard]]:
    master = shard_of(rank, size, originals())
    return master, master.local_shards


@pytest.mark.parametrize("size", [1, 2, 3, 9])
def test_all_ranks_together_have_each_parameter_once(size: int) -> None:
    by_rank = [local_shards_of(rank, size)[1] for rank in range(size)]
    for index, original in enumerate(originals()):
        parts = [local_shards[index].parameter for local_shards in by_rank]
        assert all(isinstance(part, nn.Parameter) and part.dim() == 1 for part in parts)
        assert torch.equal(torch.cat(parts), original.flatten())
        assert {whole_shape(part) for part in parts} == {original.shape}


def test_a_view_is_the_shard_and_counts_its_writes() -> None:
    """Also an empty one, so that all ranks count alike."""
    master, local_shards = local_shards_of(1, 3)
    assert {local.parameter.numel() > 0 for local in local_shards} == {True, False}
    for parameter, start, stop in local_shards:
        version = master.version
        with torch.no_grad():
            parameter.copy_(torch.ones(stop - start))
        assert master.version != version
        assert bool((master.flat[start:stop] == 1).all())
    assert not master.has_moved


def test_what_users_keep_on_a_parameter_is_on_its_view() -> None:
    parameters = originals()
    parameters[0].requires_grad_(False)
    parameters[1].decay = 0.5  # type: ignore[attr-defined]
    SEQUENCE_PARALLEL.leave(parameters[1], True)
    MAIN_GRAD.leave(parameters[1], torch.zeros(7, 5))
    views = [local.parameter for local in shard_of(0, 1, parameters).local_shards]
    assert [view.requires_grad for view in views] == [False, True, True, True, True]
    assert views[1].decay == 0.5  # type: ignore[attr-defined]
    assert SEQUENCE_PARALLEL.of(views[1])
    # Of another shape, and a layer's.
    assert not MAIN_GRAD.is_on(views[1])


def test_the_shape_of_what_is_no_part_is_its_own() -> None:
    assert whole_shape(nn.Parameter(torch.zeros(2, 3))) == torch.Size([2, 3])
