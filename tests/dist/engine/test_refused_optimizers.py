"""Optimizers that cannot train a sharded model are refused, and states of other ranks; others are not."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import flatfsdp.optim
from flatfsdp import by_class, param_groups, shard
from tests.support.meshes import replicating
from tests.support.models import Block, Net, build, data, update
from tests.support.ranks import on_ranks


def _backward(model: nn.Module, rank: int) -> None:
    for tokens in next(data(rank, 1, 1)):
        model(tokens).backward()


def _shards(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("flag", [True, False])
@pytest.mark.parametrize("stepped", [True, False])
@on_ranks(2)
def test_an_optimizer_from_before_is_refused(rank: int, flag: bool, stepped: bool) -> None:
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    if stepped:
        _backward(net, 0)
        update(optimizer)
    model = shard(net, by_class(Block), optimize_backward_concat=flag)
    _backward(model, rank)
    before = _shards(model)
    with pytest.raises(ValueError, match=r"has parameter \S*weight as it was before.*after sharding"):
        optimizer.step()
    assert all(map(torch.equal, before, _shards(model)))


@on_ranks(2)
def test_an_optimizer_from_before_on_the_meta_device_is_refused(rank: int) -> None:
    with torch.device("meta"):
        net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = shard(net, device="cpu")
    _backward(model, rank)
    with pytest.raises(ValueError, match="as it was before"):
        optimizer.step()


@pytest.mark.parametrize("flag", [True, False])
@on_ranks(2)
def test_an_optimizer_of_what_the_forward_reads_is_refused(rank: int, flag: bool) -> None:
    model = build(optimize_backward_concat=flag)
    optimizer = torch.optim.SGD([model.head.weight, model.head.bias], lr=0.1)
    _backward(model, rank)
    with pytest.raises(ValueError, match=r"has parameter head\.weight"):
        optimizer.step()


@on_ranks(2)
def test_an_optimizer_built_inside_summon_is_refused(rank: int) -> None:
    model = build()
    with model.summon_full_params():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _backward(model, rank)
    with pytest.raises(ValueError, match="as summon_full_params shows it"):
        optimizer.step()


class Lamb(torch.optim.SGD):
    """An optimizer that is refused by its name."""


class FusedLayerwise(Lamb):
    """An optimizer that is refused by the name of its base class."""


@pytest.mark.parametrize(
    "kind", [torch.optim.Adafactor, torch.optim.LBFGS, torch.optim.Muon, Lamb, FusedLayerwise]
)
@on_ranks(2)
def test_an_optimizer_of_whole_parameters_is_refused(kind: Any) -> None:
    with pytest.raises(ValueError, match=f"{kind.__name__} needs whole parameters.*element-wise"):
        kind(build().parameters(), lr=0.1)


@on_ranks(2)
def test_an_optimizer_is_refused_that_is_given_shards_later() -> None:
    net, model = Net(), build()
    optimizer = torch.optim.Adafactor(net.parameters())
    with pytest.raises(ValueError, match="Adafactor needs whole parameters"):
        optimizer.add_param_group({"params": list(model.parameters())})


@on_ranks(2)
def test_an_optimizer_of_whole_parameters_trains_another_model(rank: int) -> None:
    build()
    net = Net()
    optimizer = torch.optim.Adafactor(net.parameters())
    _backward(net, rank)
    before = _shards(net)
    optimizer.step()
    assert not any(map(torch.equal, before, _shards(net)))


def _by_dim(model: nn.Module) -> list[dict[str, Any]]:
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


@pytest.mark.parametrize("kind", [torch.optim.AdamW, flatfsdp.optim.AdamW])
@on_ranks(2)
def test_groups_by_dim_that_decay_nothing_are_refused(rank: int, kind: type[torch.optim.Optimizer]) -> None:
    model = build()
    optimizer = kind(_by_dim(model), lr=0.1)
    _backward(model, rank)
    before = _shards(model)
    with pytest.raises(ValueError, match=r"decays nothing.*flatfsdp\.param_groups"):
        optimizer.step()
    assert all(map(torch.equal, before, _shards(model)))


@on_ranks(2)
def test_groups_that_are_empty_for_another_reason_are_not_refused(rank: int) -> None:
    """Only vectors; a rank that has nothing of what is decayed; nothing left to train."""
    vectors = shard(nn.LayerNorm(20))
    model = build()
    small = param_groups(model, [{"params": ["head.bias"], "weight_decay": 0.1}, {"params": lambda *_: True}])
    assert rank == 1 or not sum(parameter.numel() for parameter in small[0]["params"])
    plain = Net().requires_grad_(False)
    for groups in (_by_dim(vectors), [*small[:1], {**small[1], "weight_decay": 0.0}], _by_dim(plain)):
        optimizer = torch.optim.AdamW(groups, lr=0.1)
        _backward(model, rank)
        optimizer.step()


OPTIMIZERS = {"torch": torch.optim.AdamW, "ours": flatfsdp.optim.AdamW}


@pytest.mark.parametrize("make", OPTIMIZERS)
@on_ranks(1, 2)
def test_a_step_without_a_backward_is_refused(rank: int, make: str) -> None:
    """`inputs=` of listed shards asks for nothing that the graph has."""
    model = build()
    optimizer = OPTIMIZERS[make](model.parameters(), lr=0.1)
    tokens = next(data(rank, 1, 1))[0]
    before = _shards(model)
    (2 * model(tokens)).backward(inputs=list(model.parameters()))
    with pytest.raises(RuntimeError, match=r"no backward has brought one.*leave inputs out"):
        optimizer.step()
    assert all(map(torch.equal, before, _shards(model)))
    model(tokens).backward()
    optimizer.step()
    assert not all(map(torch.equal, before, _shards(model)))


@pytest.mark.parametrize("make", OPTIMIZERS)
@on_ranks(2)
def test_steps_without_a_gradient_of_their_own_are_not_refused(rank: int, make: str) -> None:
    generator, critic = build(), build()
    first, second = (OPTIMIZERS[make](model.parameters(), lr=0.1) for model in (generator, critic))
    tokens = next(data(rank, 1, 1))[0]
    # Before any forward, as for a scheduler; after an evaluation; twice after one backward.
    first.step()
    with torch.no_grad():
        generator(tokens)
    first.step()
    generator(tokens).backward()
    for _ in range(2):
        update(first)
    # A forward without a backward, which another model's step does not concern.
    generator(tokens)
    critic(tokens).backward()
    second.step()
    # ... nor a step that has its gradients, before and after an evaluation with gradients.
    generator(tokens).backward()
    generator(tokens)
    update(first)
    # A closure runs the backward inside the step.
    generator(tokens)
    if make == "torch":
        first.step(lambda: generator(tokens).backward())


@on_ranks(2)
def test_optimizers_of_parts_may_step_without_gradients(rank: int) -> None:
    model = build()
    names = dict(model.named_parameters())
    head = torch.optim.SGD([p for name, p in names.items() if "blocks" not in name], lr=0.1)
    blocks = torch.optim.SGD([p for name, p in names.items() if "blocks" in name], lr=0.1)
    _backward(model, rank)
    update(head)
    head.step()
    blocks.step()


@on_ranks(2)
def test_a_failed_step_leaves_an_optimizer_free(rank: int) -> None:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = model(next(data(rank, 1, 1))[0])
    loss.register_hook(lambda _: (_ for _ in ()).throw(ValueError("by intention")))
    with pytest.raises(ValueError, match="by intention"):
        loss.backward()
    optimizer.zero_grad()
    _backward(model, rank)
    optimizer.step()


# ---- states of other ranks ------------------------------------------------------------------------------


def _trained(make: str, rank: int, width: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model after a step; with a width, of one matrix, of which all ranks have equally much."""
    model = shard(Net(), by_class(Block)) if not width else shard(nn.Linear(width, width, bias=False))
    optimizer = OPTIMIZERS[make](model.parameters(), lr=0.1)
    if width:
        model(torch.ones(1, width) + rank).square().sum().backward()
    else:
        _backward(model, rank)
    optimizer.step()
    return model, optimizer


def _through_a_file(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("width", [0, 4])
@pytest.mark.parametrize("make", OPTIMIZERS)
@on_ranks(2)
def test_the_first_ranks_state_is_refused_on_all_ranks(rank: int, make: str, width: int) -> None:
    """Also where all ranks have equally much of each parameter, and no shape would tell."""
    _, optimizer = _trained(make, rank, width)
    file = [_through_a_file(optimizer.state_dict())]
    dist.broadcast_object_list(file)
    _, fresh = _trained(make, rank, width)
    before = copy.deepcopy(fresh.state_dict()["state"])
    with pytest.raises(ValueError, match=r"rank 1 loads .* from torch\.save; save with flatfsdp\.checkpoint"):
        fresh.load_state_dict(file[0])
    after = fresh.state_dict()["state"]
    assert before.keys() == after.keys()
    for number, state in before.items():
        assert all(torch.equal(value, after[number][key]) for key, value in state.items())


@pytest.mark.parametrize("make", OPTIMIZERS)
@on_ranks(2)
def test_each_ranks_own_state_is_loaded(rank: int, make: str) -> None:
    """From a file of its own, and from memory; with replicas, the first replica's serves all."""
    model, optimizer = _trained(make, rank)
    moments = [state["exp_avg"].clone() for state in optimizer.state_dict()["state"].values()]
    for state_dict in (_through_a_file(optimizer.state_dict()), copy.deepcopy(optimizer.state_dict())):
        fresh = OPTIMIZERS[make](model.parameters(), lr=0.1)
        fresh.load_state_dict(state_dict)
        found = [state["exp_avg"] for state in fresh.state_dict()["state"].values()]
        assert all(map(torch.equal, found, moments))
    replicated = build(mesh=replicating())
    optimizer = OPTIMIZERS[make](replicated.parameters(), lr=0.1)
    file = [_through_a_file(optimizer.state_dict())]
    dist.broadcast_object_list(file)
    optimizer.load_state_dict(file[0])


@on_ranks(2)
def test_a_plain_models_state_is_refused(rank: int) -> None:
    net = Net()
    plain = torch.optim.AdamW(net.parameters(), lr=0.1)
    _backward(net, rank)
    plain.step()
    optimizer = torch.optim.AdamW(build().parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"'exp_avg' of shape .*its model was not sharded"):
        optimizer.load_state_dict(plain.state_dict())


@on_ranks(2, timeout=30)
def test_a_state_that_one_rank_alone_loads_is_refused(rank: int) -> None:
    model = shard(nn.Linear(4, 4), timeout=1.0)
    optimizer = torch.optim.AdamW(model.parameters())
    if rank == 0:
        with pytest.raises(RuntimeError, match=r"optimizer\.load_state_dict is collective, and rank 1"):
            optimizer.load_state_dict(optimizer.state_dict())
    dist.barrier()
