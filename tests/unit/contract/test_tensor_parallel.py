"""How parameters are split over ranks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from flatfsdp.comm.ranks import Ranks
from flatfsdp.contract.tensor_parallel import TensorParallel, declare_split, part_of
from flatfsdp.layers import LayerNormMLP
from flatfsdp.layers.shared import initialize


def parts(whole: Tensor, dim: int, sizes: tuple[int, ...], size: int) -> list[Tensor]:
    return [part_of(whole, dim, sizes, Ranks(None, size, rank)) for rank in range(size)]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_rank_has_its_piece_of_every_part(size: int) -> None:
    whole = torch.randn(24, 8)
    found = parts(whole, 0, (16, 8), size)
    first, second = (
        torch.cat([p[:a] if k == 0 else p[a:] for p in found]) for k, a in enumerate([16 // size] * 2)
    )
    assert torch.equal(first, whole[:16])
    assert torch.equal(second, whole[16:])
    assert torch.equal(torch.cat(parts(whole, 1, (8,), size), 1), whole)


@pytest.mark.parametrize("size", [2, 4])
def test_initial_values_do_not_depend_on_the_number_of_ranks(size: int) -> None:
    def drawn(ranks: Ranks) -> tuple[Tensor, Tensor]:
        torch.manual_seed(3)
        parameter = nn.Parameter(torch.full((16 // ranks.size, 6), torch.nan))
        declare_split(parameter, 0, (8, 8))
        initialize(parameter, nn.init.normal_, ranks)
        return parameter.detach(), torch.rand(3)

    whole, after = drawn(Ranks(None, 1, 0))
    for rank in range(size):
        part, then = drawn(Ranks(None, size, rank))
        assert torch.equal(part, part_of(whole, 0, (8, 8), Ranks(None, size, rank)))
        assert torch.equal(then, after)


def test_parameters_have_the_marks_of_megatron() -> None:
    """By which other engines and trainers know what to sum and to gather."""
    names = ("tensor_model_parallel", "partition_dim", "partition_stride", "sequence_parallel")
    layer = LayerNormMLP(
        16, 32, activation="swiglu", set_parallel_mode=True, tp_size=2, sequence_parallel=True
    )
    marks = {name: tuple(getattr(p, mark) for mark in names) for name, p in layer.named_parameters()}
    assert marks == {
        "layer_norm_weight": (False, -1, 1, True),
        "layer_norm_bias": (False, -1, 1, True),
        # Two parts of rows, each of them split.
        "fc1_weight": (True, 0, 2, False),
        "fc1_bias": (True, 0, 2, False),
        "fc2_weight": (True, 1, 1, False),
        "fc2_bias": (False, -1, 1, True),
    }


def test_sizes_that_ranks_cannot_share() -> None:
    split = TensorParallel(Ranks(None, 4, 0))
    assert split.share("Linear", "out_features", 12) == 3
    with pytest.raises(ValueError, match="Linear: out_features is 10, which 4 tensor-parallel ranks"):
        split.share("Linear", "out_features", 10)
    with pytest.raises(ValueError, match="tp_size is 0; it must be at least 1"):
        TensorParallel.of("Linear", None, 0, False)
