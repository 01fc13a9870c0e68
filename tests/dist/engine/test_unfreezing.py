"""Gradual unfreezing: `requires_grad` that changes between steps and within one, and what cannot work."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatfsdp import Precision, by_class, checkpoint, shard
from flatfsdp.engine.whole.units import named_groups, root_of
from flatfsdp.fp8 import CurrentScaling, autocast
from flatfsdp.layers import Linear
from tests.support.against_plain import assert_equal, average
from tests.support.meshes import replicating
from tests.support.models import (
    FLAGS,
    RESHARD,
    Block,
    Net,
    RecomputedNet,
    Skipping,
    build,
    data,
    each_policy,
    flat,
    plain_net,
    same,
    update,
    whole_grads,
)
from tests.support.ranks import on_ranks

# ---- between steps -----------------------------------------------------------------------------------------


SCHEDULE = [(), (2,), (1, 2), (0,), (0, 1, 2), ()]
"""Blocks that are trained in each step, beside the root, the first as built."""


def trained_blocks(net: nn.Module, trained: tuple[int, ...], by_parameter: bool) -> None:
    for index, block in enumerate(net.blocks):
        if by_parameter:
            for parameter in block.parameters():
                parameter.requires_grad = index in trained
        else:
            block.requires_grad_(index in trained)


@each_policy
@pytest.mark.parametrize("built", [(), (0, 1, 2)], ids=["built_frozen", "built_trained"])
@on_ranks(1, 2)
def test_layers_are_frozen_and_unfrozen_between_steps(rank: int, built: Any, policy: Any) -> None:
    """The result also equals that of models built that way for each step."""
    plain, net = plain_net(), plain_net()
    trained_blocks(net, built, by_parameter=True)
    model = shard(net, by_class(Block), **policy)
    ours = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    theirs = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.1)
    for step, ((tokens,), trained) in enumerate(zip(data(rank, len(SCHEDULE), 1), SCHEDULE, strict=True)):
        trained_blocks(model, trained, by_parameter=step % 2 == 0)
        trained_blocks(plain, trained, by_parameter=False)
        like = plain_net()
        trained_blocks(like, trained, by_parameter=False)
        fresh = shard(like, by_class(Block), **policy)
        fresh.load_state_dict(model.state_dict())
        losses = [each(tokens) for each in (model, plain, fresh)]
        for loss in losses:
            loss.backward()
        average(plain)
        assert all(torch.equal(loss, losses[0]) for loss in losses)
        grads = whole_grads(model)
        assert_equal(grads, whole_grads(fresh))
        assert_equal(grads, {n: p.grad for n, p in plain.named_parameters() if p.grad is not None})
        for index, block in enumerate(model.blocks):
            (group,) = block.fsdp_state.groups
            assert all((p.grad is None) == (index not in trained) for p in block.parameters())
            assert index in trained or group.main_grad is None or not group.main_grad.holds_gradients
        ledger, expected = (each.fsdp_state.shared.ledger for each in (model, fresh))
        for traffic in ("gather", "reduce"):
            assert ledger.bytes[traffic] == expected.bytes[traffic], traffic
        ledger.reset()
        update(ours, theirs)
        assert_equal(dict(model.state_dict()), dict(plain.state_dict()))


# ---- within a step -----------------------------------------------------------------------------------------


def check_like_plain(model: Any, plain: nn.Module, exact: bool = True) -> None:
    average(plain)
    for net in (model, plain):
        net.requires_grad_(True)
    expected = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    missing = [block for block in model.blocks if all(p.grad is None for p in block.parameters())]
    for block in missing:
        block.requires_grad_(False)
    ours = whole_grads(model)
    # Gradients of two losses are added in another order.
    (assert_equal if exact else torch.testing.assert_close)(ours, expected)


@each_policy
@on_ranks(1, 2)
def test_forward_and_backward_may_have_other_flags(rank: int, policy: Any) -> None:
    """The flags at each forward and at each backward, against a plain model's gradients."""
    ((first, second),) = data(rank, 1, 2)
    for at_forward, at_backward in [(True, False), (False, True), (True, True), (False, False)]:
        model, plain = build(**policy), plain_net()
        for net in (model, plain):
            net.blocks[1].requires_grad_(at_forward)
            loss = net(first)
            net.blocks[1].requires_grad_(at_backward)
            loss.backward()
        check_like_plain(model, plain)
    # Two forwards with other flags, in both orders, one or two backwards.
    for flags in [(True, False), (False, True)]:
        for together in (False, True):
            model, plain = build(**policy), plain_net()
            for net in (model, plain):
                losses = []
                for trains, tokens in zip(flags, (first, second), strict=True):
                    net.blocks[1].requires_grad_(trains)
                    losses.append(net(tokens))
                net.blocks[1].requires_grad_(True)
                for loss in [losses[0] + losses[1]] if together else losses:
                    loss.backward()
            check_like_plain(model, plain, exact=False)


@each_policy
@pytest.mark.parametrize("sync", ["last", "every"])
@on_ranks(1, 2)
def test_a_unit_that_is_frozen_in_one_microbatch(rank: int, sync: str, policy: Any) -> None:
    """A unit frozen in the last microbatch keeps, and reduces, the gradients of the first one."""
    ((first, second),) = data(rank, 1, 2)
    for flags in [(True, False), (False, True)]:
        model, plain = build(grad_sync=sync, **policy), plain_net()
        model.blocks[1].requires_grad_(flags[0])
        with model.no_sync():
            model(first).backward()
        model.blocks[1].requires_grad_(flags[1])
        model(second).backward()
        for trains, tokens in zip(flags, (first, second), strict=True):
            plain.blocks[1].requires_grad_(trains)
            plain(tokens).backward()
        check_like_plain(model, plain, exact=sync == "last")
        # Nothing of it is left for the next step.
        model.zero_grad()
        plain.zero_grad()
        for net in (model, plain):
            net.blocks[1].requires_grad_(False)
            net(first).backward()
        check_like_plain(model, plain)


@each_policy
@on_ranks(2)
def test_recomputation_around_a_unit_that_is_frozen_for_a_while(rank: int, policy: Any) -> None:
    ((tokens,),) = data(rank, 1, 1)
    for reentrant in (False, True):
        model = shard(plain_net(partial(RecomputedNet, reentrant)), by_class(Block), **policy)
        plain = plain_net()
        for trains in (True, False, True):
            for net in (model, plain):
                net.zero_grad()
                net.blocks[1].requires_grad_(trains)
                net(tokens).backward()
            check_like_plain(model, plain)


@FLAGS
@on_ranks(2)
def test_ranks_that_leave_out_different_layers_agree_on_what_is_reduced(rank: int, flag: bool) -> None:
    ((tokens,),) = data(rank, 1, 1)
    plain, net = plain_net(Skipping), plain_net(Skipping)
    # Without gathers, for which ranks would have to use the same modules.
    model = shard(net, by_class(Block), mesh=replicating(), optimize_backward_concat=flag)
    model.skips = plain.skips = rank
    for trains in (True, False, True):
        for net in (model, plain):
            net.zero_grad()
            net.blocks[1].requires_grad_(trains)
            net(tokens).backward()
        for parameter in plain.parameters():
            if parameter.grad is None and parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
        check_like_plain(model, plain)


def test_frozen_units_hold_nothing_up(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model = shard(Net(blocks=8), by_class(Block))
    model.blocks[1:7].requires_grad_(False)
    launched = []
    root_of(model)
    reducer = model.fsdp_state.root.reducer
    launch = reducer._launch
    reducer._launch = lambda unit, ends: (
        launched.append([g.name for g in unit if g.state.takes_part]) or launch(unit, ends=ends)
    )

    def before_the_embedding(*_: Any) -> None:
        launched.append(["embedding"])

    model.embedding.weight.register_hook(before_the_embedding)
    model(next(data(0, 1, 1))[0]).backward()
    found = [name for names in launched for name in names]
    assert found[:2] == ["blocks.7", "blocks.0"] and found.index("blocks.0") < found.index("embedding")
    assert not caplog.messages


# ---- optimizers and checkpoints ----------------------------------------------------------------------------


@on_ranks(1, 2)
def test_a_checkpoint_keeps_the_optimizer_state_of_what_is_frozen(rank: int, tmp_path: Path) -> None:
    """The optimizer's state for a unit that is frozen for now is saved and loaded."""
    ((tokens,),) = data(rank, 1, 1)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(tokens).backward()
    update(optimizer)
    full = checkpoint.full_optimizer_state_dict(model, optimizer)
    model.blocks[1].requires_grad_(False)
    checkpoint.save(tmp_path, model, optimizer)
    frozen = checkpoint.full_optimizer_state_dict(model, optimizer)
    other = build(seed=1)
    resumed = torch.optim.AdamW(other.parameters(), lr=1e-2)
    checkpoint.load(tmp_path, other, resumed)
    again = checkpoint.full_optimizer_state_dict(other, resumed)
    for each in (frozen, again):
        assert each["state"].keys() == full["state"].keys()
        for name, state in full["state"].items():
            assert all(torch.equal(value, each["state"][name][key]) for key, value in state.items()), name


def test_groups_that_are_frozen_keep_their_names_and_need_no_memory_for_gradients() -> None:
    model = build()
    names = [group.flat_name for _, group in named_groups(model)]
    of_gradients = {"main_grad", "reduced gradient"}
    assert of_gradients <= {row.buffer for row in model.memory_report().rows}
    model.requires_grad_(False)
    assert of_gradients.isdisjoint(row.buffer for row in model.memory_report().rows)
    assert [group.flat_name for _, group in named_groups(model)] == names


# ---- what cannot work --------------------------------------------------------------------------------------


@FLAGS
@RESHARD
@on_ranks(1, 2)
def test_a_slot_of_a_flat_parameter_by_itself_is_refused(rank: int, reshard: bool, flag: bool) -> None:
    """Freezes one parameter of a unit, through the module's tensor or summoned."""
    ((tokens,),) = data(rank, 1, 1)
    model = flat(optimize_backward_concat=flag, reshard_after_forward=reshard)
    model(tokens).backward()
    model.blocks[2].requires_grad_(False)
    model(tokens).backward()
    weight = model.blocks[2].module.up.weight
    weight.requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"parameter blocks\.2\.up\.weight was set to True by itself"):
        model(tokens)
    weight.requires_grad_(False)
    with (
        pytest.raises(RuntimeError, match=r"requires_grad of parameter head\.bias was changed while it was"),
        model.summon_full_params(),
    ):
        model.head.bias.requires_grad_(False)
    model(tokens).backward()


def test_weights_that_were_built_frozen_in_fp8_are_refused() -> None:
    torch.manual_seed(0)
    layer = Linear(32, 32, bias=False).requires_grad_(False)
    model = shard(layer, precision=Precision(compute=torch.bfloat16, fp8_weights=CurrentScaling()))
    model.requires_grad_(True)
    with pytest.raises(RuntimeError, match="sharded with frozen weights that it stores in FP8"):
        model(torch.zeros(16, 32))


@FLAGS
@RESHARD
@on_ranks(1, 2)
def test_fp8_weights_that_are_frozen_for_a_while(rank: int, reshard: bool, flag: bool) -> None:
    """Weights that were built trained in FP8 pass gradients on while they are frozen, and learn again."""
    options = {"optimize_backward_concat": flag, "reshard_after_forward": reshard}
    precision = Precision(compute=torch.bfloat16, fp8_weights=CurrentScaling())
    make = torch.Generator().manual_seed(rank)
    x = torch.randn(16, 32, generator=make)
    nets = (plain_net(lambda: nn.Sequential(Linear(32, 32), Linear(32, 32))) for _ in range(2))
    models = [shard(net, by_class(Linear), precision=precision, **options) for net in nets]
    model, other = models
    optimizer, theirs = (torch.optim.SGD(each[0].parameters(), lr=0.1) for each in models)
    for trains in (False, True, False):
        model[1].requires_grad_(trains)
        for each in models:
            each.zero_grad()
            with autocast(recipe=CurrentScaling()):
                loss = each(x).float().square().mean()
            loss.backward()
        assert all((p.grad is None) != trains for p in model[1].parameters())
        first, ours = ({n: g for n, g in whole_grads(each).items() if n.startswith("0.")} for each in models)
        assert_equal(ours, first)
        optimizer.step()
        theirs.step()
    assert_equal(dict(model.state_dict()), dict(other.state_dict()))


# ---- GANs: each part is frozen while the other one learns ------------------------------------------------


FEATURES = 20


def nothing(_: nn.Module) -> None:
    """FlatFSDP has reduced already."""


class Part(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(Block(), Block(), nn.Linear(FEATURES, FEATURES))


class Pair(nn.Module):
    """Both in one model."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.critic = Part(), Part()

    def forward(self, noise: Tensor, real: Tensor | None) -> Tensor:
        fake = self.generator(noise)
        if real is None:
            return -self.critic(fake).mean()
        return self.critic(fake.detach()).square().mean() + (self.critic(real) - 1).square().mean()


def adversarial(
    pair: nn.Module, generator: nn.Module, critic: nn.Module, rank: int, reduce: Callable[[nn.Module], None]
) -> list[Tensor]:
    """Alternating steps; each one's optimizer has its own part.  Momentum would show a zero gradient."""
    make = torch.Generator().manual_seed(rank)
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.05, momentum=0.9) for part in (critic, generator)]
    losses = []
    for _ in range(3):
        noise, real = (torch.randn(4, FEATURES, generator=make) for _ in range(2))
        for trains_critic in (True, False):
            critic.requires_grad_(trains_critic)
            generator.requires_grad_(not trains_critic)
            frozen = generator if trains_critic else critic
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss = pair(noise, real if trains_critic else None)
            loss.backward()
            losses.append(loss.detach())
            assert all(p.grad is None for p in frozen.parameters())
            reduce(pair)
            for optimizer in optimizers:
                optimizer.step()
    return losses


@each_policy
@pytest.mark.parametrize("one_root", [False, True], ids=["two_models", "one_model"])
@on_ranks(1, 2)
def test_a_critic_is_frozen_in_the_steps_of_its_generator(rank: int, one_root: bool, policy: Any) -> None:
    plain, pair = plain_net(Pair), plain_net(Pair)
    if one_root:
        pair = shard(pair, by_class(Block, Part), **policy)
    else:
        pair.generator = shard(pair.generator, by_class(Block), **policy)
        pair.critic = shard(pair.critic, by_class(Block), **policy)
    ours = adversarial(pair, pair.generator, pair.critic, rank, nothing)
    theirs = adversarial(plain, plain.generator, plain.critic, rank, average)
    assert same(ours, theirs)
    assert_equal(dict(pair.state_dict()), dict(plain.state_dict()))
