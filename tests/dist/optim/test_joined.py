"""Our optimizers over views of flat shards: one run a group of options, with the bits of whole portions."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from flatfsdp import FlatFSDP, Precision, auto_wrap, by_class, microbatches, param_groups
from flatfsdp.engine.units import named_groups
from flatfsdp.fp8 import autocast
from flatfsdp.kernels.optim.runs import Run
from flatfsdp.optim import SGD, AdamW
from tests.support.in_place import cut_by_hand
from tests.support.models import Block, Net, data, same
from tests.support.models import wrapped as build
from tests.support.ranks import on_ranks
from tests.support.stored_weights import RECIPE, batches
from tests.support.stored_weights import build as build_fp8

BF16 = torch.bfloat16
NO_DECAY = {"params": lambda name, shape: len(shape) < 2, "weight_decay": 0.0}
OPTIONS: list[tuple[Any, dict[str, Any]]] = [
    (AdamW, {"lr": 1e-2}),
    (AdamW, {"lr": 1e-2, "betas": (0.9, 0.95), "moment_dtype": BF16}),
    (SGD, {"lr": 1e-2}),
    (SGD, {"lr": 1e-2, "momentum": 0.9, "dampening": 0.5}),
]


def backward(model: FlatFSDP, rank: int, seed: int, count: int = 2) -> None:
    for tokens in microbatches(model, next(data(rank + 10 * seed, 1, count))):
        model(tokens).backward()


def step(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad()


def masters(model: FlatFSDP) -> list[Tensor]:
    return [group.master.flat.detach().clone() for _, group in named_groups(model)]


def counted(optimizer: Any) -> list[int]:
    """Records how many runs each step has from now on."""
    counts: list[int] = []
    update = optimizer._update

    def counting(runs: Sequence[Run], *rest: Any) -> None:
        counts.append(len(runs))
        update(runs, *rest)

    optimizer._update = counting
    return counts


# ---- the same bits --------------------------------------------------------------------------------------


@pytest.mark.parametrize("grouped", [False, True], ids=["one group", "two groups"])
@pytest.mark.parametrize("which", range(len(OPTIONS)))
@on_ranks(1, 2, 3)
def test_views_have_the_bits_of_portions(rank: int, world_size: int, which: int, grouped: bool) -> None:
    """Parameters, norms, the number of runs, and what the next forward needs is there."""
    kind, options = OPTIONS[which]
    whole, viewed = (build(precision=Precision(compute=BF16)) for _ in range(2))
    views = cut_by_hand(viewed)
    optimizers, counts = [], []
    for model in (whole, viewed):
        groups: Any = model.parameters() if model is whole else list(views.values())
        if grouped:
            groups = param_groups(model, [NO_DECAY])
        optimizers.append(kind(groups, max_grad_norm=0.3, **options))
        counts.append(counted(optimizers[-1]))
    for seed in range(4):
        for model, optimizer in zip((whole, viewed), optimizers, strict=True):
            backward(model, rank, seed)
            optimizer.step()
            assert all(group.compute_shard.state.is_cast for _, group in named_groups(model))
            optimizer.zero_grad()
        assert torch.equal(optimizers[0].grad_norm, optimizers[1].grad_norm)
        assert same(masters(whole), masters(viewed))
    assert counts[0] == counts[1]


class HeadFirst(Net):
    """A model whose root lists its own parameters after those of the blocks."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("embedding", "head"):
            self._modules[name] = self._modules.pop(name)


@on_ranks(2)
def test_norms_are_added_up_in_the_order_of_units(rank: int) -> None:
    torch.manual_seed(0)
    models = [auto_wrap(HeadFirst(), by_class(Block), optimize_backward_concat=False) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    views = cut_by_hand(models[1])
    names = [name for name, _ in HeadFirst().named_parameters()]
    assert names != list(views)
    optimizers = [
        AdamW(models[0].parameters(), lr=0.0, max_grad_norm=1.0),
        AdamW([views[name] for name in names], lr=0.0, max_grad_norm=1.0),
    ]
    for seed in range(10):
        for model, optimizer in zip(models, optimizers, strict=True):
            backward(model, rank, seed, 1)
            step(optimizer)
        assert torch.equal(optimizers[0].grad_norm, optimizers[1].grad_norm)


@pytest.mark.parametrize("kind", [AdamW, SGD])
@on_ranks(4)
def test_with_replicas(rank: int, kind: Any) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    whole, viewed = (build(mesh=mesh) for _ in range(2))
    parameters = [list(whole.parameters()), list(cut_by_hand(viewed).values())]
    optimizers = [kind(each, max_grad_norm=0.3) for each in parameters]
    for seed in range(3):
        for model, optimizer in zip((whole, viewed), optimizers, strict=True):
            backward(model, rank, seed)
            step(optimizer)
        assert same(masters(whole), masters(viewed))


@on_ranks(1, 3)
def test_weights_that_are_stored_in_fp8(rank: int) -> None:
    """Amaxes of all of them are taken in the step."""
    results = []
    for in_place in (False, True):
        model = build_fp8(True, BF16, wrap=auto_wrap)
        parameters = list(cut_by_hand(model).values() if in_place else model.parameters())
        optimizer = AdamW(parameters, lr=0.05)
        losses = []
        for batch in batches(rank, 3, 2):
            model.ledger.reset()
            for x in microbatches(model, batch):
                with autocast(recipe=RECIPE):
                    loss = model(x).float().square().mean()
                loss.backward()
                losses.append(loss.detach())
            step(optimizer)
        assert model.ledger.bytes["measure"] == 0
        results.append([*losses, *masters(model)])
    assert same(*results)


# ---- states ---------------------------------------------------------------------------------------------


@on_ranks(2)
def test_each_view_has_its_part_of_the_state(rank: int) -> None:
    model = build()
    views = cut_by_hand(model)
    optimizer = AdamW(list(views.values()), lr=1e-2)
    for seed in range(2):
        backward(model, rank, seed)
        step(optimizer)
    assert any(view.numel() == 0 for view in views.values())
    for view in views.values():
        state = optimizer.state.get(view, {})
        assert bool(state) == (view.numel() > 0)
        for key in ("exp_avg", "exp_avg_sq") if state else ():
            assert state[key].shape == view.shape
            assert state[key].any()
        assert not state or state["step"] == 2


@pytest.mark.parametrize("kind", [AdamW, SGD])
@on_ranks(2)
def test_a_loaded_state_is_joined_again(rank: int, kind: Any) -> None:
    """Training continues with the same bits, also of a copy of the optimizer with its own parameters."""
    options = {"lr": 1e-2, **({"momentum": 0.9} if kind is SGD else {})}
    model, other = build(), build()
    optimizer = kind(list(cut_by_hand(model).values()), **options)
    for seed in range(2):
        backward(model, rank, seed)
        step(optimizer)
    again = kind(list(cut_by_hand(other).values()), **options)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for (_, ours), (_, theirs) in zip(named_groups(model), named_groups(other), strict=True):
        theirs.master.store(ours.master.gather())
    for copied in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        for mine, view in zip(
            copied.param_groups[0]["params"], optimizer.param_groups[0]["params"], strict=True
        ):
            mine.grad = torch.full_like(mine, 0.5) if mine.numel() else None
            assert torch.equal(mine, view)
        copied.step()
        assert {float(state["step"]) for state in copied.state.values() if state} == {3.0}
    counts = counted(again)
    for seed in range(2, 4):
        for trained, its in ((model, optimizer), (other, again)):
            backward(trained, rank, seed)
            step(its)
    assert same(masters(model), masters(other))
    assert counts == [len(named_groups(model))] * 2


@on_ranks(2)
def test_torch_optimizers_load_the_state_and_count_right(rank: int) -> None:
    """Views have one count together, which `torch.optim.AdamW` would raise once for each of them."""
    model = build()
    views = list(cut_by_hand(model).values())
    optimizer = AdamW(views, lr=1e-2)
    backward(model, rank, 0)
    step(optimizer)
    plain = torch.optim.AdamW(views, lr=1e-2)
    plain.load_state_dict(optimizer.state_dict())
    backward(model, rank, 1)
    step(plain)
    assert {float(plain.state[view]["step"]) for view in views if view.numel()} == {2.0}
    assert {float(optimizer.state[view]["step"]) for view in views if view.numel()} == {1.0}


# ---- views that go their own way ------------------------------------------------------------------------


def like_plain(rank: int, world_size: int, change: Callable[[dict[str, Any]], None], **options: Any) -> None:
    """Three steps against plain PyTorch, with `change` done to the gradients before the second one."""
    torch.manual_seed(0)
    plain = Net()
    model = build()
    views = cut_by_hand(model)
    ours = AdamW(list(views.values()), lr=1e-2, nonfinite="step", **options)
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-2, **options)
    for seed in range(3):
        backward(model, rank, seed, 1)
        for other in range(world_size):
            ((tokens,),) = data(other + 10 * seed, 1, 1)
            (plain(tokens) / world_size).backward()
        if seed == 1:
            change(views)
            change(dict(plain.named_parameters()))
        step(ours)
        step(reference)
    state = model.state_dict()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-6, msg=name)


def drop(parameters: dict[str, Any]) -> None:
    for name, parameter in parameters.items():
        if "up." in name or name == "head.bias":
            parameter.grad = None


def replace(parameters: dict[str, Any]) -> None:
    for name, parameter in parameters.items():
        if "norm" in name:
            parameter.grad = torch.full_like(parameter, 0.25)


@pytest.mark.parametrize("change", [drop, replace])
@on_ranks(1, 3)
def test_gradients_of_some_views_are_gone_or_replaced(rank: int, world_size: int, change: Any) -> None:
    like_plain(rank, world_size, change)


@on_ranks(2)
def test_views_with_different_counts_stay_apart_when_loaded(rank: int) -> None:
    model = build()
    views = cut_by_hand(model)
    optimizer = AdamW(list(views.values()), lr=1e-2)
    for seed in range(3):
        backward(model, rank, seed)
        if seed == 1:
            drop(views)
        step(optimizer)
    steps = {name: float(optimizer.state[view]["step"]) for name, view in views.items() if view.numel()}
    assert set(steps.values()) <= {2.0, 3.0}
    assert all((count == 2.0) == ("up." in name or name == "head.bias") for name, count in steps.items())
    again = AdamW(list(views.values()), lr=1e-2)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    backward(model, rank, 3)
    step(again)
    loaded = {name: float(again.state[view]["step"]) for name, view in views.items() if view.numel()}
    assert loaded == {name: count + 1 for name, count in steps.items()}


@on_ranks(2)
def test_a_state_that_is_replaced_or_emptied_counts(rank: int) -> None:
    """Programs do so that move states to the host and back, or begin anew."""
    moved, kept = build(), build()
    optimizers = [AdamW(list(cut_by_hand(model).values()), lr=1e-2) for model in (moved, kept)]
    for seed in range(3):
        for model, optimizer in zip((moved, kept), optimizers, strict=True):
            backward(model, rank, seed)
            step(optimizer)
        for state in optimizers[0].state.values():
            state.update({key: value.clone() for key, value in state.items()})
    assert same(masters(moved), masters(kept))
    optimizers[0].state.clear()
    optimizers[1].state = optimizers[1].state.__class__(dict)
    for model, optimizer in zip((moved, kept), optimizers, strict=True):
        backward(model, rank, 4)
        step(optimizer)
        assert {float(state["step"]) for state in optimizer.state.values()} == {1.0}
    assert same(masters(moved), masters(kept))


@on_ranks(2)
def test_two_optimizers_with_half_of_the_views_each(rank: int) -> None:
    """Neither optimizer writes to the other's elements."""
    whole, halves = build(), build()
    views = cut_by_hand(halves)
    one = AdamW(list(cut_by_hand(whole).values()), lr=1e-2)
    names = list(views)
    two = [AdamW([views[name] for name in names[start::2]], lr=1e-2) for start in (0, 1)]
    for seed in range(3):
        backward(whole, rank, seed)
        backward(halves, rank, seed)
        step(one)
        for optimizer in two:
            optimizer.step()
        for optimizer in two:
            optimizer.zero_grad()
        assert same(masters(whole), masters(halves))


@on_ranks(2)
def test_groups_can_be_added_and_changed(rank: int) -> None:
    """Changes options by schedulers, in place, and by `add_param_group`."""
    whole, viewed = build(), build()
    groups = [param_groups(whole, [NO_DECAY])]
    cut_by_hand(viewed)
    groups.append(param_groups(viewed, [NO_DECAY]))
    optimizers = []
    for of_model in groups:
        optimizers.append(AdamW(of_model[:1], lr=1e-2))
        optimizers[-1].add_param_group(of_model[1])
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5) for optimizer in optimizers]
    for seed in range(3):
        for model, optimizer, scheduler in zip((whole, viewed), optimizers, schedulers, strict=True):
            backward(model, rank, seed)
            step(optimizer)
            scheduler.step()
        assert same(masters(whole), masters(viewed))


@pytest.mark.parametrize("kind", [AdamW, SGD])
@on_ranks(2)
def test_a_step_before_the_last_backward_raises_and_changes_nothing(rank: int, kind: Any) -> None:
    model = build()
    views = list(cut_by_hand(model).values())
    optimizer = kind(views, lr=1e-2)
    before = masters(model)
    ((tokens,),) = data(rank, 1, 1)
    with model.no_sync():
        model(tokens).backward()
    with pytest.raises(RuntimeError, match="accumulated and not yet reduced"):
        optimizer.step()
    assert same(masters(model), before)
    assert not any(optimizer.state.values())
    optimizer.zero_grad()
    backward(model, rank, 1)
    step(optimizer)


@on_ranks(2)
def test_param_groups_cuts_nothing_of_a_model_in_place(rank: int) -> None:
    model = build()
    views = cut_by_hand(model)
    backward(model, rank, 0)
    groups = param_groups(model, [NO_DECAY, {"params": ["head.weight"], "lr": 3e-2}])
    name_of = {view: name for name, view in views.items()}
    names = [{name_of[view] for view in group["params"]} for group in groups]
    shapes = {name: p.dim() for name, p in Net().named_parameters()}
    assert names == [
        {name for name, dim in shapes.items() if dim < 2},
        {"head.weight"},
        {name for name, dim in shapes.items() if dim == 2 and name != "head.weight"},
    ]
    assert [group.get("lr") for group in groups] == [None, 3e-2, None]
    param_groups(model, [NO_DECAY])


@on_ranks(2)
def test_ordinary_parameters_beside_views(rank: int) -> None:
    model = build()
    extra = nn.Parameter(torch.ones(5))
    optimizer = AdamW([*cut_by_hand(model).values(), extra], max_grad_norm=1e9)
    backward(model, rank, 0)
    norm = model.clip_grad_norm_(1e9)
    extra.grad = torch.full((5,), 2.0)
    optimizer.step()
    torch.testing.assert_close(optimizer.grad_norm, (norm.square() + 20.0).sqrt())
