"""When gradients are reduced: memory, bits and the choice of "auto"."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from flatfsdp import Lanes, Precision, by_class, microbatches, shard
from flatfsdp.engine.storage.main_grad import MainGrad
from flatfsdp.engine.whole import grad_sync
from flatfsdp.options import Policy
from tests.support.lanes import OfStep, differing
from tests.support.models import RESHARD, Block, Net, backward, build, data, plain_net, update
from tests.support.ranks import on_ranks

COUNT = 3
BF16_SENT = Precision(reduce=torch.bfloat16)


def trained(rank: int, steps: int = 2, **options: Any) -> dict[str, Tensor]:
    model = build(**options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for batches in data(rank, steps, COUNT):
        backward(model, batches)
        update(optimizer)
    return model.state_dict()


@RESHARD
@pytest.mark.parametrize("precision", [Precision(), BF16_SENT], ids=["FP32 sent", "bf16 sent"])
@on_ranks(2)
def test_every_microbatch_is_added_to_the_mean_of_the_ranks(
    rank: int, reshard: bool, precision: Precision
) -> None:
    """Beside plain PyTorch on one rank, with the gradients of both."""
    net, steps = plain_net(Net), 2
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    sent = precision.reduce
    for of_ranks in zip(*(data(each, steps, COUNT) for each in range(2)), strict=True):
        for parameter in net.parameters():
            parameter.grad = torch.zeros_like(parameter)
        for pair in zip(*of_ranks, strict=True):
            one, other = (torch.autograd.grad(net(batch), list(net.parameters())) for batch in pair)
            for parameter, *both in zip(net.parameters(), one, other, strict=True):
                assert parameter.grad is not None
                # The library adds in what is sent; two numbers have one sum in any order.
                mean = (both[0].to(sent) + both[1].to(sent)).div_(2)
                parameter.grad += mean
        update(optimizer)
    for flag in (True, False):
        options = {"optimize_backward_concat": flag, "reshard_after_forward": reshard, "precision": precision}
        assert differing(trained(rank, steps, grad_sync="every", **options), net.state_dict()) == []


@on_ranks(2)
def test_every_has_the_bits_of_lanes_in_blocks(rank: int) -> None:
    """One microbatch a lane, and a block of what all ranks run at a time: the same sums."""
    expected = trained(rank, grad_sync="every")
    model = build(lanes=Lanes(2 * COUNT, block=2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for batches in data(rank, 2, COUNT):
        # Half of it, which is exact: gradients of lanes are added where others are averaged.
        backward(OfStep(model, 2), batches)
        update(optimizer)
    assert differing(model.state_dict(), expected) == []
    assert differing(trained(rank), expected), "the last microbatch adds in another order"


@RESHARD
@on_ranks(2)
def test_three_units_have_gradients_at_a_time(
    rank: int, reshard: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = shard(
        plain_net(partial(Net, 8)), by_class(Block), grad_sync="every", reshard_after_forward=reshard
    )
    alive: weakref.WeakSet[Tensor] = weakref.WeakSet()
    most, allocate = [0], MainGrad._allocate

    def counted(main_grad: MainGrad) -> None:
        allocate(main_grad)
        assert main_grad.tensor is not None
        alive.add(main_grad.tensor)
        most.append(len(alive))

    monkeypatch.setattr(MainGrad, "_allocate", counted)
    (batches,) = data(rank, 1, COUNT)
    for tokens in microbatches(model, batches):
        model(tokens).backward()
        assert len(alive) == 0
    assert max(most) <= 3
    (row,) = [row for row in model.memory_report().rows if row.buffer == "main_grad"]
    assert row.at_a_time < row.total / 2


def chooses_every(memory: float, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether "auto" is "every" on a GPU with this memory."""
    monkeypatch.setattr(grad_sync, "memory_of", lambda _device: memory)
    model = build(grad_sync="auto")
    model.memory_report()
    is_every: bool = model.fsdp_state.shared.reduces_every
    return is_every


@on_ranks(2)
def test_auto_chooses_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    model, said = build(), list[str]()
    monkeypatch.setattr(grad_sync.logger, "warning", lambda text, *values: said.append(text % values))
    # AdamW's two moments are counted before there is an optimizer.
    needed = model.memory_report().peak + 2 * 4 * sum(p.numel() for p in model.parameters())
    for hosts_of, share in (("2", 0.6), ("1", 0.75)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", hosts_of)
        assert chooses_every(needed / share * 0.99, monkeypatch)
        assert not chooses_every(needed / share * 1.01, monkeypatch)
    assert ["'every'" in text for text in said] == [True, False] * 2


@on_ranks(2)
def test_auto_is_last_where_memory_is_not_known() -> None:
    model = build(grad_sync="auto")
    model.memory_report()
    assert not model.fsdp_state.shared.reduces_every


@on_ranks(2)
def test_ranks_whose_gpus_differ(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        RuntimeError, match=r"has chosen 'every'; if GPUs have different memory, choose yourself"
    ):
        chooses_every(1.0 if rank else 1e12, monkeypatch)


def test_auto_with_lanes() -> None:
    with pytest.raises(ValueError, match='leave out grad_sync="auto"'):
        Policy(Precision(), grad_sync="auto", lanes=2)
