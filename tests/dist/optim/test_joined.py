"""Our optimizers over local shards: one run a master shard, with the bits of one parameter for all of it."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatfsdp import Precision, by_class, microbatches, param_groups, shard
from flatfsdp.engine.api.shard import make_unit, make_units
from flatfsdp.engine.whole.units import named_groups
from flatfsdp.fp8 import autocast
from flatfsdp.kernels.optim.runs import Run
from flatfsdp.optim import SGD, AdamW
from tests.support import fp8_layers, stored_weights
from tests.support.meshes import HYBRID, placed
from tests.support.models import Block, Net, build, data, plain_net, same, update
from tests.support.ranks import of_all_ranks, on_ranks

BF16 = torch.bfloat16
NO_DECAY = {"params": lambda name, shape: len(shape) < 2, "weight_decay": 0.0}
OPTIONS: list[tuple[Any, dict[str, Any]]] = [
    (AdamW, {"lr": 1e-2}),
    (AdamW, {"lr": 1e-2, "betas": (0.9, 0.95), "moment_dtype": BF16}),
    (SGD, {"lr": 1e-2}),
    (SGD, {"lr": 1e-2, "momentum": 0.9, "dampening": 0.5}),
]


Listed = tuple[Any, list[nn.Parameter]]
"""A model, and its parameters for an optimizer."""


def listing_flats(net: nn.Module, *units: type[nn.Module], **options: Any) -> Listed:
    """A model like those of `shard`, but that an optimizer has one parameter of each master shard."""
    make = partial(make_unit, lists_flat=True)
    model = make_units(net, by_class(*units), make, {"precision": Precision(), **options})
    return model, [group.master.flat for _, group in named_groups(model)]


def listing_local_shards(net: nn.Module, *units: type[nn.Module], **options: Any) -> Listed:
    model = shard(net, by_class(*units), **options)
    return model, list(model.parameters())


def backward(model: Any, rank: int, seed: int, count: int = 2) -> None:
    for tokens in microbatches(model, next(data(rank + 10 * seed, 1, count))):
        model(tokens).backward()


def together(
    rank: int, models: Sequence[Any], optimizers: Sequence[Any], steps: int = 3, count: int = 2
) -> Iterator[int]:
    """Takes each step with all models, each with its optimizer."""
    for seed in range(steps):
        for model, optimizer in zip(models, optimizers, strict=True):
            backward(model, rank, seed, count)
            update(optimizer)
        yield seed


def masters(model: Any) -> list[Tensor]:
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
def test_local_shards_have_the_bits_of_flat_ones(rank: int, which: int, grouped: bool) -> None:
    """Parameters, in as few runs as can be, and what the next forward needs is there; norms of one group."""
    kind, options = OPTIONS[which]
    precision = Precision(compute=BF16)
    whole, flats = listing_flats(plain_net(), Block, precision=precision)
    model = build(precision=precision)
    groups: Any = list(model.parameters())
    if grouped:
        # Of equal options, so that flat parameters may have them.
        groups = param_groups(model, [{"params": lambda name, shape: len(shape) < 2}])
    # The terms of a norm are added up group by group.
    max_norm = None if grouped else 0.3
    optimizers = [kind(each, max_grad_norm=max_norm, **options) for each in (flats, groups)]
    counts = list(map(counted, optimizers))
    for seed in range(4):
        for each, optimizer in zip((whole, model), optimizers, strict=True):
            backward(each, rank, seed)
            optimizer.step()
            assert all(group.compute_shard.state.is_cast for _, group in named_groups(each))
            optimizer.zero_grad()
        if not grouped:
            assert torch.equal(optimizers[0].grad_norm, optimizers[1].grad_norm)
        assert same(masters(whole), masters(model))
    if grouped:
        assert max(counts[1]) < len(list(model.parameters()))
    else:
        assert counts[0] == counts[1]


@pytest.mark.parametrize("kind", [AdamW, partial(SGD, momentum=0.9)], ids=["AdamW", "SGD"])
@pytest.mark.parametrize(
    ("world_size", "options"),
    [
        (1, {"optimize_backward_concat": False}),
        (3, {"precision": Precision(param=BF16, compute=BF16, grad=torch.float32)}),
        (3, {"cpu_offload": True, "reshard_after_forward": False}),
        (4, HYBRID),
    ],
    ids=["off", "bf16 storage", "offload", "hybrid"],
)
@on_ranks()
def test_wherever_they_are_kept(rank: int, kind: Any, options: dict[str, Any]) -> None:
    whole, flats = listing_flats(plain_net(), Block, **placed(options))
    model = build(**options)
    optimizers = [kind(each, lr=1e-2, max_grad_norm=0.3) for each in (flats, model.parameters())]
    for _ in together(rank, (whole, model), optimizers):
        assert torch.equal(optimizers[0].grad_norm, optimizers[1].grad_norm)
        assert same(masters(whole), masters(model))


class HeadFirst(Net):
    """A model whose root lists its own parameters after those of the blocks."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("embedding", "head"):
            self._modules[name] = self._modules.pop(name)


@on_ranks(2)
def test_norms_are_added_up_in_the_order_of_units(rank: int) -> None:
    whole, flats = listing_flats(plain_net(HeadFirst), Block)
    model = shard(plain_net(HeadFirst), by_class(Block))
    of_units = [parameter for _, group in named_groups(model) for parameter in group.master.parameters]
    assert any(a is not b for a, b in zip(of_units, model.parameters(), strict=True))
    optimizers = [AdamW(each, lr=0.0, max_grad_norm=1.0) for each in (flats, model.parameters())]
    for _ in together(rank, (whole, model), optimizers, 10, count=1):
        assert torch.equal(optimizers[0].grad_norm, optimizers[1].grad_norm)


@on_ranks(2)
def test_norms_over_several_models_are_added_up_model_by_model(rank: int) -> None:
    """Norms add up as those of a pipeline's stages: the first model whole, then the second."""
    of_forms: list[tuple[list[Any], list[nn.Parameter]]] = [([], []), ([], [])]
    for seed in range(2):
        for (models, parameters), make in zip(of_forms, (listing_flats, listing_local_shards), strict=True):
            torch.manual_seed(seed)
            model, listed = make(Net(), Block)
            models.append(model)
            parameters += listed
    optimizers = [AdamW(parameters, lr=1e-2, max_grad_norm=0.3) for _, parameters in of_forms]
    for (tokens,) in data(rank, 10, 1):
        for (models, _), optimizer in zip(of_forms, optimizers, strict=True):
            for index, model in enumerate(models):
                (model(tokens) * (1 + 2 * index)).backward()
            update(optimizer)
        assert torch.equal(optimizers[0].grad_norm, optimizers[1].grad_norm)


@on_ranks(1, 3)
def test_weights_that_are_stored_in_fp8(rank: int) -> None:
    """Amaxes of all of them are taken in the step."""
    precision = Precision(compute=BF16, fp8_weights=stored_weights.RECIPE)
    whole, flats = listing_flats(fp8_layers.seeded(stored_weights.Net), fp8_layers.Block, precision=precision)
    model = shard(fp8_layers.seeded(stored_weights.Net), by_class(fp8_layers.Block), precision=precision)
    results = []
    for each, parameters in ((whole, flats), (model, list(model.parameters()))):
        optimizer, losses = AdamW(parameters, lr=0.05), []
        for batch in stored_weights.batches(rank, 3, 2):
            each.fsdp_state.shared.ledger.reset()
            for x in microbatches(each, batch):
                with autocast(recipe=stored_weights.RECIPE):
                    loss = each(x).float().square().mean()
                loss.backward()
                losses.append(loss.detach())
            update(optimizer)
        assert each.fsdp_state.shared.ledger.bytes["measure"] == 0
        results.append([*losses, *masters(each)])
    assert same(*results)


# ---- states ---------------------------------------------------------------------------------------------


@on_ranks(2)
def test_each_local_shard_has_its_part_of_the_state(rank: int) -> None:
    model = build()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    for seed in range(2):
        backward(model, rank, seed)
        update(optimizer)
    assert any(parameter.numel() == 0 for parameter in model.parameters())
    for parameter in model.parameters():
        state = optimizer.state.get(parameter, {})
        assert bool(state) == (parameter.numel() > 0)
        for key in ("exp_avg", "exp_avg_sq") if state else ():
            assert state[key].shape == parameter.shape
            assert state[key].any()
        assert not state or state["step"] == 2


@pytest.mark.parametrize("kind", [AdamW, SGD])
@on_ranks(2)
def test_a_loaded_state_is_joined_again(rank: int, kind: Any) -> None:
    """Training continues with the same bits, also of a copy of the optimizer with its own parameters."""
    options = {"lr": 1e-2, **({"momentum": 0.9} if kind is SGD else {})}
    model, other = build(), build()
    optimizer = kind(model.parameters(), **options)
    for seed in range(2):
        backward(model, rank, seed)
        update(optimizer)
    again = kind(other.parameters(), **options)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for (_, ours), (_, theirs) in zip(named_groups(model), named_groups(other), strict=True):
        theirs.master.store(ours.master.gather())
    for copied in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        for mine, theirs in zip(copied.param_groups[0]["params"], model.parameters(), strict=True):
            mine.grad = torch.full_like(mine, 0.5) if mine.numel() else None
            assert torch.equal(mine, theirs)
        copied.step()
        assert {float(state["step"]) for state in copied.state.values() if state} == {3.0}
    counts = counted(again)
    for seed in range(2, 4):
        for trained, its in ((model, optimizer), (other, again)):
            backward(trained, rank, seed)
            update(its)
    assert same(masters(model), masters(other))
    assert counts == [len(named_groups(model))] * 2


@on_ranks(2)
def test_torch_optimizers_load_the_state_and_count_right(rank: int) -> None:
    """They have one count together, which `torch.optim.AdamW` would raise once for each of them."""
    model = build()
    parameters = list(model.parameters())
    optimizer = AdamW(parameters, lr=1e-2)
    backward(model, rank, 0)
    update(optimizer)
    plain = torch.optim.AdamW(parameters, lr=1e-2)
    plain.load_state_dict(optimizer.state_dict())
    backward(model, rank, 1)
    update(plain)
    for each, count in ((plain, 2.0), (optimizer, 1.0)):
        assert {float(each.state[parameter]["step"]) for parameter in parameters if parameter.numel()} == {
            count
        }


# ---- local shards that go their own way -----------------------------------------------------------------


def like_plain(rank: int, world_size: int, change: Callable[[dict[str, Any]], None], **options: Any) -> None:
    """Three steps against plain PyTorch, with `change` done to the gradients before the second one."""
    plain, model = plain_net(), build()
    ours = AdamW(model.parameters(), lr=1e-2, nonfinite="step", **options)
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-2, **options)
    for seed in range(3):
        backward(model, rank, seed, 1)
        for other in range(world_size):
            ((tokens,),) = data(other + 10 * seed, 1, 1)
            (plain(tokens) / world_size).backward()
        if seed == 1:
            change(dict(model.named_parameters()))
            change(dict(plain.named_parameters()))
        update(ours)
        update(reference)
    state = model.state_dict()
    torch.testing.assert_close(state, plain.state_dict(), rtol=1e-4, atol=1e-6)


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
def test_gradients_of_some_are_gone_or_replaced(rank: int, world_size: int, change: Any) -> None:
    like_plain(rank, world_size, change)


@on_ranks(2)
def test_different_counts_stay_apart_when_loaded(rank: int) -> None:
    model = build()
    parameters = dict(model.named_parameters())
    optimizer = AdamW(parameters.values(), lr=1e-2)
    for seed in range(3):
        backward(model, rank, seed)
        if seed == 1:
            drop(parameters)
        update(optimizer)
    steps = {name: float(optimizer.state[p]["step"]) for name, p in parameters.items() if p.numel()}
    assert set(steps.values()) <= {2.0, 3.0}
    assert all((count == 2.0) == ("up." in name or name == "head.bias") for name, count in steps.items())
    again = AdamW(parameters.values(), lr=1e-2)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    backward(model, rank, 3)
    update(again)
    loaded = {name: float(again.state[p]["step"]) for name, p in parameters.items() if p.numel()}
    assert loaded == {name: count + 1 for name, count in steps.items()}


@on_ranks(2)
def test_a_state_that_is_replaced_or_emptied_counts(rank: int) -> None:
    """Programs do so that move states to the host and back, or begin anew."""
    moved, kept = build(), build()
    optimizers = [AdamW(model.parameters(), lr=1e-2) for model in (moved, kept)]
    for _ in together(rank, (moved, kept), optimizers):
        for state in optimizers[0].state.values():
            state.update({key: value.clone() for key, value in state.items()})
    assert same(masters(moved), masters(kept))
    optimizers[0].state.clear()
    optimizers[1].state = optimizers[1].state.__class__(dict)
    for model, optimizer in zip((moved, kept), optimizers, strict=True):
        backward(model, rank, 4)
        update(optimizer)
        assert {float(state["step"]) for state in optimizer.state.values()} == {1.0}
    assert same(masters(moved), masters(kept))


@on_ranks(2)
def test_two_optimizers_with_half_of_the_parameters_each(rank: int) -> None:
    """Neither optimizer writes to the other's elements."""
    whole, halves = build(), build()
    one = AdamW(whole.parameters(), lr=1e-2)
    two = [AdamW(list(halves.parameters())[start::2], lr=1e-2) for start in (0, 1)]
    for seed in range(3):
        backward(whole, rank, seed)
        backward(halves, rank, seed)
        update(one)
        for optimizer in two:
            optimizer.step()
        for optimizer in two:
            optimizer.zero_grad()
        assert same(masters(whole), masters(halves))


@on_ranks(2)
def test_groups_can_be_added_and_changed(rank: int) -> None:
    """By `add_param_group` and a scheduler; against groups that are there at once, and changed in place."""
    added, at_once = build(), build()
    groups = [param_groups(model, [NO_DECAY]) for model in (added, at_once)]
    optimizers = [AdamW(groups[0][:1], lr=1e-2), AdamW(groups[1], lr=1e-2)]
    optimizers[0].add_param_group(groups[0][1])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizers[0], 1, 0.5)
    for _ in together(rank, (added, at_once), optimizers):
        assert same(masters(added), masters(at_once))
        scheduler.step()
        for group in optimizers[1].param_groups:
            group["lr"] *= 0.5


@pytest.mark.parametrize("lanes", [None, 6])
@pytest.mark.parametrize("name", ["embedding.weight", "head.bias"])
@on_ranks(3)
def test_an_optimizer_of_what_only_some_ranks_have(
    rank: int, world_size: int, name: str, lanes: int | None
) -> None:
    """The norm of its gradients is collective, also for ranks without elements."""
    model = build(lanes=lanes)
    backward(model, rank, 0)
    part = dict(model.named_parameters())[name]
    assert 0 in of_all_ranks(part.numel())
    optimizer = AdamW([part], max_grad_norm=1.0)
    norm = part.grad.norm()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    optimizer.step()
    torch.testing.assert_close(optimizer.grad_norm, norm)
    assert len({each.item() for each in of_all_ranks(optimizer.grad_norm)}) == 1
    changed = [key for key, value in model.state_dict().items() if not torch.equal(before[key], value)]
    assert changed == [name]
