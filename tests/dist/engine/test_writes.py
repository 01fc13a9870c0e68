"""A forward that writes to its parameters in place raises on all ranks; no other forward does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flatfsdp import Precision, shard
from tests.support.meshes import REPLICATED, placed
from tests.support.models import FLAGS, grads_of, same
from tests.support.ranks import on_ranks

WRITTEN = "forward of unit {} wrote in place to parameter .*{}"


class Renormed(nn.Module):
    """An embedding that shortens its longest rows before it reads them, then a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4, max_norm=0.1)
        self.out = nn.Linear(4, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.table(tokens))


def small(seed: int = 0, **options: Any) -> Any:
    """Two units; the inner one writes."""
    torch.manual_seed(seed)
    return shard(nn.Sequential(shard(Renormed(), **options), nn.Linear(4, 4)), **options)


def tokens_of(rank: int) -> Tensor:
    """The second rank's tokens are rows that are short enough."""
    return torch.tensor([1, 2, 3]) if rank == 0 else torch.tensor([9])


def shorten(model: Any) -> None:
    with model.summon_full_params(), torch.no_grad():
        model[0].table.weight[9] = 0.0


@FLAGS
@on_ranks(2)
def test_an_embedding_that_renormalises_raises_on_all_ranks(rank: int, flag: bool) -> None:
    for options in (
        {},
        {"reshard_after_forward": False},
        {"precision": Precision(compute=torch.bfloat16)},
        REPLICATED,
    ):
        for grad in (True, False):
            model = small(optimize_backward_concat=flag, **placed(options))
            shorten(model)
            message = WRITTEN.format("0", r"0\.table\.weight")
            with torch.set_grad_enabled(grad), pytest.raises(RuntimeError, match=message) as error:
                model(tokens_of(rank))
            # With the flag off there is one counter for all views, and still one of them is named.
            assert "out.bias" not in str(error.value)
    with pytest.raises(RuntimeError, match=WRITTEN.format("root", r"table\.weight")):
        shard(Renormed(), optimize_backward_concat=flag)(tokens_of(rank))


def test_a_failed_step_says_what_it_drops_if_it_drops_anything(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        model = small()
        with pytest.raises(RuntimeError, match="wrote in place"):
            model(tokens_of(0))
    assert caplog.messages == []
    table = model[0].table
    table.max_norm = None
    with model.no_sync():
        model(tokens_of(0)).sum().backward()
    table.max_norm = 0.1
    with pytest.raises(RuntimeError, match="wrote in place"):
        model(tokens_of(0))
    assert [message[:13] for message in caplog.messages] == ["a step failed"]


@FLAGS
@pytest.mark.parametrize("grad", [True, False], ids=["train", "eval"])
def test_one_rank_raises_too(flag: bool, grad: bool) -> None:
    with torch.set_grad_enabled(grad), pytest.raises(RuntimeError, match=WRITTEN.format("0", "table")):
        small(optimize_backward_concat=flag)(tokens_of(0))


@on_ranks(2)
def test_a_step_after_the_error_is_clean(rank: int) -> None:
    """With the flag on nothing else remembers the write: the next step gathers the shards anew."""
    written, fresh = (small() for _ in range(2))
    with pytest.raises(RuntimeError, match="wrote in place"):
        written(tokens_of(0))
    for model in (written, fresh):
        model[0].table.max_norm = None
        model(tokens_of(rank)).sum().backward()
    assert same(grads_of(written), grads_of(fresh)) and grads_of(fresh)


class Codebook(nn.Module):
    """A module that counts its forwards in a frozen parameter and, legally, in a buffer."""

    def __init__(self, *, in_parameter: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.count = nn.Parameter(torch.zeros(1), requires_grad=False)
        self.register_buffer("calls", torch.zeros(1))
        self.in_parameter = in_parameter

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            (self.count if self.in_parameter else self.calls).add_(1.0)
        return (x * self.weight).relu_()


@FLAGS
@on_ranks(2)
def test_frozen_parameters_are_watched_and_buffers_are_not(flag: bool) -> None:
    with pytest.raises(RuntimeError, match=WRITTEN.format("root", "count, and what")):
        shard(Codebook(in_parameter=True), optimize_backward_concat=flag)(torch.ones(4))
    model = shard(Codebook(in_parameter=False), optimize_backward_concat=flag)
    for _ in range(2):
        model(torch.ones(4)).sum().backward()
    assert model.calls == 2.0


class WritesLater(nn.Module):
    """A module that writes in the recomputation only."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 2:
            with torch.no_grad():
                self.weight.mul_(0.5)
        return x * self.weight


@pytest.mark.parametrize("reentrant", [True, False])
@on_ranks(2)
def test_a_recomputation_is_watched_too(reentrant: bool) -> None:
    unit = shard(WritesLater())
    x = torch.ones(4, requires_grad=True)
    with pytest.raises(RuntimeError, match="wrote in place to parameter weight"):
        checkpoint(unit, x, use_reentrant=reentrant).sum().backward()


@FLAGS
@on_ranks(2)
def test_a_compiled_module_is_watched_too(rank: int, flag: bool) -> None:
    for grad in (True, False):
        model = small(optimize_backward_concat=flag)
        model[0].compile(backend="aot_eager")
        message = WRITTEN.format("0", r"0\.table\.weight")
        if grad and not flag:
            # The compiler runs nothing: it refuses the view, as PyTorch does.
            message = "a view and its base or another view of its base has been modified inplace"
        with torch.set_grad_enabled(grad), pytest.raises(RuntimeError, match=message):
            model(tokens_of(rank))
        torch._dynamo.reset()


@on_ranks(2)
def test_the_way_out_that_the_message_names_works(rank: int) -> None:
    model = small()
    model[0].table.max_norm = None
    model(tokens_of(rank)).sum().backward()
    with model.summon_full_params(), torch.no_grad():
        table = model[0].table.weight
        table.renorm_(2, 0, 0.1)
    model(tokens_of(rank)).sum().backward()
    with model.summon_full_params():
        assert (model[0].table.weight.norm(dim=1) <= 0.1 + 1e-6).all()
