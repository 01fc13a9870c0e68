"""Random numbers by seed and name, and one stream for each tensor-parallel rank."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from flatfsdp.comm.ranks import Ranks
from flatfsdp.layers import bias_dropout_add
from flatfsdp.parallel import RNGTracker, seeded

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
ON_EACH = pytest.mark.parametrize("device", DEVICES)


def drawn(device: str, seed: int, *names: str) -> Tensor:
    with seeded(seed, *names):
        return torch.randn(8, device=device)


def tracker(rank: int) -> RNGTracker:
    """A tracker as on one of two ranks."""
    made = RNGTracker()
    made._ranks = Ranks(None, 2, rank)
    return made


@ON_EACH
def test_a_seed_and_names_say_which_numbers(device: str) -> None:
    assert torch.equal(drawn(device, 3, "layers.0"), drawn(device, 3, "layers.0"))
    values = [drawn(device, *key) for key in ((3, "layers.0"), (3, "layers.1"), (4, "layers.0"))]
    values += [drawn(device, 3), drawn(device, 3, "layers", "0")]
    assert len({tuple(v.tolist()) for v in values}) == len(values)


@ON_EACH
@pytest.mark.parametrize("draws", [0, 3])
def test_what_is_drawn_outside_does_not_notice(device: str, draws: int) -> None:
    torch.manual_seed(5)
    expected = torch.rand(4, device=device), torch.rand(9, device=device)
    torch.manual_seed(5)
    before = torch.rand(4, device=device)
    with contextlib.suppress(KeyError), seeded(1, "embedding"):
        torch.rand(draws, device=device)
        raise KeyError
    assert torch.equal(before, expected[0])
    assert torch.equal(torch.rand(9, device=device), expected[1])


@ON_EACH
def test_ranks_differ_inside_and_agree_outside(device: str) -> None:
    inside, outside = [], []
    for rank in range(2):
        torch.manual_seed(7)
        before = torch.rand(4, device=device)
        with tracker(rank).fork():
            mine = torch.rand(4 + 5 * rank, device=device)[:4]
        with tracker(rank).fork():
            again = torch.rand(4, device=device)
        outside.append(torch.cat([before, torch.rand(4, device=device)]))
        inside += [mine, again]
    assert torch.equal(outside[0], outside[1])
    every = [*inside, *outside[0].split(4)]
    assert len({tuple(v.tolist()) for v in every}) == len(every)


@ON_EACH
def test_an_exception_inside_leaves_the_ranks_alike(device: str) -> None:
    after = []
    for rank in range(2):
        torch.manual_seed(7)
        with contextlib.suppress(KeyError), tracker(rank).fork():
            torch.rand(3 * rank, device=device)
            raise KeyError
        after.append(torch.rand(4, device=device))
    assert torch.equal(after[0], after[1])


@ON_EACH
def test_one_rank_draws_as_if_there_were_no_tracker(device: str) -> None:
    torch.manual_seed(7)
    expected = torch.rand(6, device=device)
    torch.manual_seed(7)
    with RNGTracker().fork():
        found = torch.rand(6, device=device)
    assert torch.equal(found, expected)


@ON_EACH
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_recomputation_drops_the_same_elements(device: str, use_reentrant: bool) -> None:
    mine = tracker(1)

    def branch(x: Tensor) -> Tensor:
        x = bias_dropout_add(x, None, None, 0.5, True)
        with mine.fork():
            x = bias_dropout_add(x * x, None, None, 0.5, True)
        return torch.nn.functional.dropout(x * x, 0.5)

    grads = []
    for function in (branch, lambda x: checkpoint(branch, x, use_reentrant=use_reentrant)):
        torch.manual_seed(11)
        x = torch.arange(1.0, 257.0, device=device).view(8, 32).requires_grad_()
        function(x).sum().backward()
        grads.append(x.grad)
    assert grads[0] is not None and 0 < grads[0].count_nonzero() < 256
    assert torch.equal(grads[0], grads[1])
