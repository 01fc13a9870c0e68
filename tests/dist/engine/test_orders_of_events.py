"""Orders of events in which gradients, weights or ranks once went wrong."""

from __future__ import annotations

import copy
import weakref
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable
from torch import nn
from torch.utils.checkpoint import checkpoint

from flatfsdp import FlatFSDP, Precision, auto_wrap, by_class, microbatches
from flatfsdp.compat.fairscale import FullyShardedDataParallel
from flatfsdp.fp8 import autocast
from flatfsdp.layers import Linear
from tests.support.models import Block, Net, build, data, grads_of, same
from tests.support.ranks import run_ranks

FLAGS = pytest.mark.parametrize("flag", [False, True], ids=["off", "on"])


class DetachedUse(nn.Module):
    """All gradients of the weight land before the input's gradient, which needs the weight, is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight.detach() + torch.ones_like(x) * self.weight


class FrozenBelow(nn.Module):
    """A frozen layer under a trained one, called on two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(8, 8)
        self.frozen.requires_grad_(False)
        self.trained = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.trained(torch.tanh(self.frozen(x)))


class Twice(nn.Module):
    def __init__(self, unit: nn.Module, recompute: bool) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.unit = unit
        self.recompute = recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        for _ in range(2):
            y = checkpoint(self.unit, y, use_reentrant=True) if self.recompute else self.unit(y)
        return (y * self.unit(self.first(-x))).square().mean()


def against_plain(rank: int, world_size: int, unit: Any, recompute: bool, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    plain = Twice(unit(), recompute)
    sharded = copy.deepcopy(plain)
    sharded.unit = FlatFSDP(sharded.unit, **options)
    model = FlatFSDP(sharded, **options)
    x = torch.randn(4, 8)
    model(x).backward()
    plain(x).backward()
    optimizers = (
        torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=1.0) for m in (model, plain)
    )
    for optimizer in optimizers:
        optimizer.step()
    ours = model.state_dict()
    for name, expected in plain.state_dict().items():
        torch.testing.assert_close(ours[name], expected, rtol=1e-4, atol=1e-5, msg=name)


@FLAGS
@pytest.mark.parametrize("poison", [False, True])
@pytest.mark.parametrize("recompute", [False, True], ids=["plain", "reentrant"])
@pytest.mark.parametrize("unit", [DetachedUse, FrozenBelow])
def test_parameters_stay_until_the_gradients_of_the_inputs_are_there(
    unit: Any, recompute: bool, poison: bool, flag: bool
) -> None:
    options = {"optimize_backward_concat": flag, "poison_on_free": poison}
    run_ranks(2, against_plain, unit, recompute, options)


class FrozenBetween(nn.Module):
    """A unit around a unit: its frozen layer is needed after its trained one has landed."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__()
        self.inner = FlatFSDP(nn.Linear(4, 4), **options)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.head = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.frozen(self.inner(x))).sum()


def frozen_between(rank: int, world_size: int, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = FlatFSDP(FrozenBetween(options), **options)
    model(torch.ones(2, 4)).backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.requires_grad)


@FLAGS
@pytest.mark.parametrize("poison", [False, True])
def test_a_frozen_layer_between_units_stays_for_the_gradient_of_what_it_took(
    poison: bool, flag: bool
) -> None:
    run_ranks(2, frozen_between, {"optimize_backward_concat": flag, "poison_on_free": poison})


class InsideAndOutside(nn.Module):
    """One layer, used plainly and inside a reentrant checkpoint, in either order."""

    def __init__(self, recompute: tuple[bool, bool]) -> None:
        super().__init__()
        self.stem, self.layer, self.head = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 1)
        self.recompute = recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for recompute in self.recompute:
            x = (checkpoint(self.layer, x, use_reentrant=True) if recompute else self.layer(x)).tanh()
        return self.head(x).sum()


def inside_and_outside(rank: int, world_size: int, recompute: tuple[bool, bool]) -> None:
    grads, reductions = [], []
    for flag in (False, True):
        torch.manual_seed(0)
        model = FlatFSDP(InsideAndOutside(recompute), optimize_backward_concat=flag)
        torch.manual_seed(rank)
        model(torch.randn(3, 5)).backward()
        grads.append(grads_of(model))
        reductions.append(model.ledger.calls["reduce"])
    assert same(*grads)
    assert reductions == [1, 1], "what a nested backward brings does not count as the outer one's"


@pytest.mark.parametrize("recompute", [(False, True), (True, False), (True, True)])
def test_a_layer_inside_and_outside_a_checkpoint_is_reduced_once(recompute: tuple[bool, bool]) -> None:
    run_ranks(2, inside_and_outside, recompute)


def reentrant_memory(rank: int, world_size: int, flag: bool) -> list[int]:
    """Units in memory when each block's norm has its gradient, with reentrant recomputation around blocks."""
    model, seen = build(optimize_backward_concat=flag), []
    units = [m.fsdp_state.unit for m in (model, *model.blocks)]

    def count(*_: Any) -> None:
        seen.append(sum(not unit.is_sharded for unit in units))

    for block in model.blocks:
        block.module.norm.register_full_backward_hook(count)
        block.forward = partial(checkpoint, block.forward, use_reentrant=True)
    for (tokens,) in data(rank, 2, 1):
        seen.clear()
        model(tokens).backward()
    return seen


@FLAGS
def test_reentrant_recomputation_frees_each_unit_after_its_backward(flag: bool) -> None:
    for seen in run_ranks(2, reentrant_memory, flag):
        assert seen == [2, 2, 2], "the root and the block itself"


@FLAGS
def test_a_hook_sees_the_sum_of_both_uses(flag: bool) -> None:
    x = torch.randn(4, 8)
    largest = []
    for wrap in (False, True):
        torch.manual_seed(0)
        layer = nn.Linear(8, 8)
        layer.weight.register_hook(lambda grad: grad.clamp(-1e-2, 1e-2))
        model = FlatFSDP(layer, optimize_backward_concat=flag) if wrap else layer
        model(model(x)).square().mean().backward()
        grad = model.flat_param.grad[:64] if wrap else layer.weight.grad.flatten()
        largest.append(grad.abs().max().item())
    assert largest[0] == largest[1] == pytest.approx(1e-2)


def test_a_hook_that_needs_a_leaf_needs_the_flag() -> None:
    layer = nn.Linear(2, 2)
    layer.bias.register_post_accumulate_grad_hook(lambda parameter: None)
    with pytest.raises(ValueError, match="parameter bias has a post-accumulate-gradient hook"):
        FlatFSDP(layer)


def failing_last_backward(rank: int, world_size: int, flag: bool) -> None:
    """The last microbatch's backward fails after some units have been reduced."""
    torch.manual_seed(0)
    model = auto_wrap(Net(6), by_class(Block), optimize_backward_concat=flag)
    torch.manual_seed(0)
    fresh = auto_wrap(Net(6), by_class(Block), optimize_backward_concat=flag)
    failing, clean = data(rank, 2, 2)

    def fail(_grad: torch.Tensor) -> None:
        raise ZeroDivisionError

    def fail_in_backward(module: Any, inputs: Any, output: torch.Tensor) -> None:
        if model.microbatch.is_last:
            output.register_hook(fail)

    handle = model.blocks[0].up.register_forward_hook(fail_in_backward)
    step = (model(tokens).backward() for tokens in microbatches(model, failing))
    with pytest.raises(ZeroDivisionError):
        list(step)
    handle.remove()
    assert grads_of(model) == []
    for m in (model, fresh):
        for tokens in microbatches(m, clean):
            m(tokens).backward()
    assert same(grads_of(model), grads_of(fresh))


@FLAGS
def test_a_backward_that_fails_half_reduced_leaves_no_gradient(flag: bool) -> None:
    run_ranks(2, failing_last_backward, flag)


def eval_failure(rank: int, world_size: int) -> None:
    """An exception in an eval forward between microbatches loses nothing; nor does a child's zero_grad."""
    model, reference = build(optimize_backward_concat=True), build(optimize_backward_concat=True)
    first, second = next(data(rank, 1, 2))
    for m in (model, reference):
        with m.no_sync():
            m(first).backward()
        if m is model:
            with pytest.raises(IndexError), torch.no_grad():
                m(torch.full((1, 2), 999))
        m(second).backward()
    assert same(grads_of(model), grads_of(reference))
    with model.no_sync():
        model(first).backward()
    model.blocks[2].zero_grad()
    kept = [m.fsdp_state.unit.trained[0].main_grad.holds_gradients for m in (model, *model.blocks)]
    assert kept == [True, True, True, False]


def test_failed_evaluation_and_a_childs_zero_grad_leave_other_gradients_alone() -> None:
    run_ranks(2, eval_failure)


def load_with_padding(rank: int, world_size: int) -> None:
    """The last rank's shard is all padding, so that loading writes nothing there."""
    model = FlatFSDP(nn.Linear(4, 4), reshard_after_forward=False, optimize_backward_concat=True)
    x = torch.ones(2, 4)
    model(x)
    state = model.state_dict()
    model.load_state_dict({name: value + 1 for name, value in state.items()})
    torch.testing.assert_close(
        model(x).detach(), x @ (state["weight"] + 1).t() + state["bias"] + 1, rtol=1e-5, atol=1e-5
    )


def test_loading_reaches_ranks_that_hold_only_padding() -> None:
    run_ranks(4, load_with_padding)


def user_hooks(rank: int, world_size: int, flag: bool) -> None:
    """A hook on a parameter runs before its gradient lands."""
    grads = []
    for factor in (1.0, 10.0):
        torch.manual_seed(0)
        net = Net()
        net.blocks[0].up.weight.register_hook(lambda g, factor=factor: g * factor)
        model = auto_wrap(net, by_class(Block), optimize_backward_concat=flag)
        model(next(data(rank, 1, 1))[0]).backward()
        grads.append(model.blocks[0].clip_grad_norm_(torch.inf))
    assert grads[1] > 2 * grads[0]


@FLAGS
def test_hooks_on_parameters_run_before_the_gradient_lands(flag: bool) -> None:
    run_ranks(2, user_hooks, flag)


def test_second_derivatives_raise() -> None:
    model = FlatFSDP(nn.Linear(2, 2), optimize_backward_concat=True)
    loss = model(torch.ones(1, 2)).square().sum()
    with pytest.raises(RuntimeError, match="create_graph=True"):
        loss.backward(create_graph=True)


def test_parameters_on_one_rank_can_be_read_before_the_first_forward() -> None:
    plain = nn.Linear(4, 4)
    expected = plain.weight.detach().bfloat16()
    model = FlatFSDP(plain, precision=Precision(compute=torch.bfloat16), optimize_backward_concat=True)
    assert torch.equal(model.weight, expected)


def test_an_opaque_output_of_the_root_can_be_differentiated() -> None:
    run_ranks(2, opaque_root)


class OpaqueNet(Net):
    def forward(self, tokens: torch.Tensor) -> Any:
        return type("Output", (), {"loss": super().forward(tokens)})()


def opaque_root(rank: int, world_size: int) -> None:
    tokens = next(data(rank, 1, 1))[0]
    grads = []
    for net in (Net, OpaqueNet):
        torch.manual_seed(0)
        model = auto_wrap(net(), by_class(Block), optimize_backward_concat=True, poison_on_free=True)
        output = model(tokens)
        (output if net is Net else output.loss).backward()
        grads.append(grads_of(model))
    assert same(*grads)


def test_a_process_group_ends_when_it_is_destroyed_though_a_model_has_it() -> None:
    run_ranks(2, destroyed_group)


def destroyed_group(rank: int, world_size: int) -> None:
    """Gloo's threads may abort the process if they outlive the interpreter."""
    for wrap in (FlatFSDP, FullyShardedDataParallel):
        group = dist.new_group(range(world_size))
        gone = weakref.ref(group)
        model = wrap(Linear(32, 32), process_group=group)
        with autocast(amax_reduction_group=group):
            model(torch.ones(32, 32)).sum().backward()
        model.state_dict()
        dist.destroy_process_group(group)
        del group
        assert gone() is None
        for use, argument in ((model, torch.ones(32, 32)), (model.clip_grad_norm_, 1.0)):
            with pytest.raises(RuntimeError, match="the process group of a model or layer is gone"):
                use(argument)
    # The engine imports this before a group is there, so that it cannot keep one as default argument.
    assert dist.group.WORLD not in differentiable.all_reduce.__defaults__
    # One rank needs no group.
    group = [dist.new_group([each]) for each in range(world_size)][rank]
    model = FlatFSDP(nn.Linear(2, 2), process_group=group)
    model(torch.ones(2, 2)).sum().backward()
    dist.destroy_process_group(group)
    del group
    assert model.clip_grad_norm_(1.0) > 1.0
