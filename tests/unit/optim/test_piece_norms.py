"""`PieceNorms`: each piece has the norm of its elements, whatever gradients they are in."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flatfsdp.comm.ranks import ALONE
from flatfsdp.contract.flat_shard import GradAt
from flatfsdp.flat.layout import FlatLayout, ParamSpec
from flatfsdp.optim.piece_norms import InPieces, PieceNorms
from tests.support.gpu.marks import NEEDS_GPU

BOUNDS = [(0, 16), (16, 30), (32, 32), (32, 48), (48, 64), (64, 65)]
ORDERS = pytest.mark.parametrize("order", [1.0, 2.0, 3.0, torch.inf])


def norms(*gradients: list[GradAt], order: float, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    of_ranks = [InPieces(BOUNDS, ALONE, grads) for grads in gradients]
    return PieceNorms(of_ranks, dtype, torch.device("cpu"), order).over_ranks(None)


def expected(grad: Tensor, order: float, dtype: torch.dtype = torch.float32) -> Tensor:
    parts = [grad[start:stop] if start < stop else torch.zeros(1, dtype=grad.dtype) for start, stop in BOUNDS]
    return torch.stack([torch.linalg.vector_norm(part, order, dtype=dtype) for part in parts])


@ORDERS
def test_of_one_gradient_and_of_several_in_any_order(order: float) -> None:
    torch.manual_seed(0)
    whole = torch.randn(80)
    several = [GradAt(start, whole[start:stop].clone()) for start, stop in ((48, 65), (0, 30), (32, 48))]
    one, same = norms([GradAt(0, whole)], several, order=order)
    assert torch.equal(one, expected(whole, order))
    assert torch.equal(one, same)


def test_pieces_elsewhere_have_norm_zero() -> None:
    whole = torch.ones(80)
    first, last, none = norms([GradAt(0, whole[:16])], [GradAt(48, whole[48:])], [], order=2.0)
    assert first.tolist() == [4, 0, 0, 0, 0, 0]
    assert last.tolist() == [0, 0, 0, 0, 4, 1]
    assert none.tolist() == [0] * 6


@ORDERS
def test_gradients_of_several_dtypes(order: float) -> None:
    torch.manual_seed(0)
    dtypes = [torch.float32, torch.bfloat16, torch.float64, torch.bfloat16]
    wholes = [torch.randn(80, dtype=dtype) for dtype in dtypes]
    found = norms(*([GradAt(0, whole)] for whole in wholes), order=order, dtype=torch.float64)
    for norm, whole in zip(found, wholes, strict=True):
        assert torch.equal(norm, expected(whole, order, torch.float64))


@ORDERS
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_GPU)])
def test_where_shards_are_cut_does_not_change_a_bit(order: float, device: str) -> None:
    """Buffers of 12 parts, in which slots of odd lengths begin and end anywhere."""
    torch.manual_seed(0)
    wholes, gradients = [], []
    for part, dtype in ((48, torch.float32), (70_000, torch.bfloat16), (11_200, torch.float32)):
        layout = FlatLayout.pack([ParamSpec(f"{n}", (part * n - 3,)) for n in (2, 1, 5)], cuts=12)
        wholes.append(torch.randn(layout.padded_numel(12), dtype=dtype, device=device))
        gradients.append(layout.bounds)
    of_counts = []
    for shards in (1, 2, 3, 4, 6, 12):
        total = torch.zeros(sum(map(len, gradients)), device=device)
        for rank in range(shards):
            own = [
                [GradAt(rank * len(whole) // shards, whole.chunk(shards)[rank].clone())] for whole in wholes
            ]
            of_rank = [InPieces(bounds, ALONE, grads) for bounds, grads in zip(gradients, own, strict=True)]
            norms = PieceNorms(of_rank, torch.float32, total.device, order).over_ranks(None)
            total += torch.cat(norms)
        of_counts.append(total)
    assert all(torch.equal(each, of_counts[0]) for each in of_counts)
    assert of_counts[0].min() > 0


def test_what_is_bad_elsewhere_shows_in_all_norms() -> None:
    gradients = [InPieces(BOUNDS, ALONE, [GradAt(0, torch.ones(80))])]
    for bad in (torch.inf, torch.nan):
        of_pieces = PieceNorms(gradients, torch.float32, torch.device("cpu"), 2.0)
        (norm,) = of_pieces.over_ranks(None, [torch.tensor(0.0), torch.tensor(bad)])
        assert not norm.isfinite().any()
