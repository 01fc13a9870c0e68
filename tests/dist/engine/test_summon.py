"""`summon_full_params`: ordinary parameters for a while, read, written and given back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from flatfsdp import by_class, shard
from flatfsdp.checkpoint import full_state_dict
from tests.support.models import FLAGS, Block, Net, plain_net
from tests.support.ranks import on_ranks


def tied_net() -> Net:
    """Head and embedding share a weight; one block's norm is frozen."""
    net = Net(2)
    net.head.weight = net.embedding.weight
    net.blocks[0].norm.requires_grad_(False)
    return net


def pair(seed: int = 0, **options: Any) -> tuple[Any, nn.Module]:
    """A sharded model, and a plain copy."""
    net, plain = (plain_net(tied_net, seed) for _ in range(2))
    return shard(net, by_class(Block), **options), plain


@FLAGS
@on_ranks(1, 2)
def test_inside_the_module_is_the_plain_one(flag: bool) -> None:
    model, plain = pair(optimize_backward_concat=flag)
    outside = [name for name, _ in model.named_parameters()]
    with model.summon_full_params():
        ours, theirs = dict(model.named_parameters()), dict(plain.named_parameters())
        assert list(ours) == list(theirs)
        assert [p.shape for p in model.parameters()] == [p.shape for p in plain.parameters()]
        for name, expected in theirs.items():
            assert torch.equal(ours[name], expected) and ours[name].requires_grad == expected.requires_grad
        assert isinstance(model.head.weight, nn.Parameter)
        assert model.head.weight is model.embedding.weight
        assert len(dict(model.named_parameters(remove_duplicate=False))) == len(theirs) + 1
        assert all(torch.equal(v, plain.state_dict()[k]) for k, v in model.state_dict().items())
        with pytest.raises(RuntimeError, match="inside summon_full_params"):
            model(torch.zeros(1, 2, dtype=torch.long))
    assert [name for name, _ in model.named_parameters()] == outside


def change(model: nn.Module) -> None:
    """Changes parameters in place, by replacing the object, and by `.data`; one is frozen, one tied."""
    with torch.no_grad():
        model.blocks[1].up.weight.mul_(2)
        model.blocks[0].norm.weight.fill_(3)
        model.embedding.weight[0] = 7
    model.blocks[0].down.bias = nn.Parameter(torch.full_like(model.blocks[0].down.bias, 5.0))
    model.head.bias.data = torch.ones_like(model.head.bias)


@FLAGS
@pytest.mark.parametrize("options", [{}, {"rank0_only": True, "offload_to_cpu": True}], ids=["all", "rank 0"])
@on_ranks(1, 2, 4)
def test_changes_are_written_back_or_not(rank: int, world_size: int, options: Any, flag: bool) -> None:
    mesh = {"mesh": dist.init_device_mesh("cpu", (2, 2))} if world_size == 4 else {}
    model, plain = pair(optimize_backward_concat=flag, **mesh)
    before = full_state_dict(model)
    with model.summon_full_params(writeback=False, **options):
        if rank == 0 or "rank0_only" not in options:
            change(model)
    assert all(torch.equal(v, before[k]) for k, v in full_state_dict(model).items())
    with model.summon_full_params(**options):
        if rank == 0 or "rank0_only" not in options:
            change(model)
        else:
            assert model.head.bias.isnan().all()
    change(plain)
    expected = plain.state_dict()
    assert all(torch.equal(v, expected[k]) for k, v in full_state_dict(model).items())
    tokens = torch.arange(8).view(1, 8)
    assert torch.equal(model(tokens), plain(tokens))


@on_ranks(2)
def test_other_ranks_than_the_first_list_their_shards(rank: int) -> None:
    model, plain = pair()
    outside = dict(model.named_parameters())
    with model.summon_full_params(rank0_only=True):
        inside = dict(model.named_parameters())
    assert list(inside) == list(outside) == list(dict(plain.named_parameters()))
    whole = [parameter.shape for parameter in plain.parameters()]
    assert [parameter.shape for parameter in inside.values()] == whole or rank > 0
    assert all(inside[name] is shard for name, shard in outside.items()) is (rank > 0)


@on_ranks(2)
def test_one_unit_alone() -> None:
    model, plain = pair()
    with model.summon_full_params(recurse=False):
        # Local shards are flat.
        assert [name for name, p in model.named_parameters() if p.dim() == 2] == ["embedding.weight"]
    with model.blocks[1].summon_full_params():
        assert torch.equal(model.blocks[1].up.weight, plain.blocks[1].up.weight)
        assert model.head.bias.isnan().all()


def give_another_shape(model: nn.Module) -> None:
    change(model)
    model.blocks[1].up.weight = nn.Parameter(torch.zeros(3))


def untie(model: nn.Module) -> None:
    for module, value in ((model.head, 0.0), (model.embedding, 1.0)):
        module.weight = nn.Parameter(torch.full_like(module.weight, value))


@on_ranks(2)
def test_what_goes_wrong_inside_changes_nothing_and_hangs_nobody(rank: int) -> None:
    model, _ = pair()
    before = full_state_dict(model)
    for spoil, message in (
        (give_another_shape, r"up\.weight was given shape \(3,\)"),
        (untie, "are tied, but got different values"),
    ):
        with pytest.raises(ValueError, match=message), model.summon_full_params():
            spoil(model)

    def fail_inside(rank0_only: bool) -> None:
        with model.summon_full_params(rank0_only=rank0_only):
            if rank == 0 or not rank0_only:
                change(model)
                raise KeyError

    with pytest.raises(KeyError):
        fail_inside(rank0_only=False)
    raises = KeyError if rank == 0 else RuntimeError
    with pytest.raises(raises, match=None if rank == 0 else "the first rank failed: KeyError"):
        fail_inside(rank0_only=True)
    assert all(torch.equal(v, before[k]) for k, v in full_state_dict(model).items())

    def summon(*_: Any) -> None:
        with model.summon_full_params():
            pass

    tokens = torch.zeros(1, 2, dtype=torch.long)
    handle = model.blocks[0].register_forward_hook(summon)
    with pytest.raises(RuntimeError, match="inside a forward or backward"):
        model(tokens)
    handle.remove()
    loss = model(tokens)
    loss.register_hook(summon)
    with pytest.raises(RuntimeError, match="inside a forward or backward"):
        loss.backward()


@on_ranks(2)
def test_nothing_is_lost_or_written_by_halves() -> None:
    """Writes that would be overwritten at the end raise."""
    model, _ = pair()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(torch.zeros(1, 2, dtype=torch.long)).backward()

    def step_inside() -> None:
        with model.summon_full_params():
            optimizer.step()

    with pytest.raises(RuntimeError, match="were written to"):
        step_inside()
    before = full_state_dict(model)

    def write_inside_read_only() -> None:
        with model.summon_full_params(writeback=False), model.summon_full_params():
            pass

    with pytest.raises(RuntimeError, match="writes are lost"):
        write_inside_read_only()

    assert all(torch.equal(v, before[k]) for k, v in full_state_dict(model).items())
