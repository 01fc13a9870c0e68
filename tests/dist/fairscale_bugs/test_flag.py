"""Bugs B1 to B10 of fairscale's `optimize_backward_concat`, which do not occur here.

fairscale is read at branch `ngoyal_changes_for_pp_fp8_jiecaoyu_free_fp16_shard`, where the flag lives; each
test says what happens there.  `test_general.py` has its bugs that need no flag.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.profiler import profile

from flatfsdp import FlatFSDP, FlattenParamsWrapper, Precision, auto_wrap, by_class, microbatches
from flatfsdp.engine.whole.units import units_in
from tests.support.against_plain import (
    UNITS,
    assert_equal,
    batches_of_all_ranks,
    fp32_tensors,
    gradient_buffers,
    plain_grads,
    resident_bytes,
)
from tests.support.models import (
    FLAGS,
    RESHARD,
    Block,
    Net,
    backward,
    data,
    each_policy,
    grads_of,
    plain_net,
    same,
    whole_grads,
)
from tests.support.models import wrapped as build
from tests.support.ranks import on_ranks

BF16 = Precision(compute=torch.bfloat16)
PRECISIONS = pytest.mark.parametrize("precision", [Precision(), BF16], ids=["fp32", "bf16"])


# ---- B1: parameters stay in memory between microbatches -------------------------------------------------


@FLAGS
@on_ranks(2, 4)
def test_b1_a_no_sync_backward_frees_the_parameters(rank: int, world_size: int, flag: bool) -> None:
    """There: every unit stays gathered until the next forward, `flat_param` is the full bf16 tensor.

    Only the middle block keeps its parameters by policy.
    """
    net = plain_net()
    make = partial(FlatFSDP, optimize_backward_concat=flag, precision=BF16)
    for index, block in enumerate(net.blocks):
        net.blocks[index] = make(block, reshard_after_forward=index != 1)
    model = make(net)
    layout = model.blocks[1].fsdp_state.groups[0].layout
    only_kept = [0, 0, layout.padded_numel(world_size) * torch.bfloat16.itemsize, 0]
    masters = [shard.detach().clone() for shard in model.parameters()]

    tokens = batches_of_all_ranks()[rank]
    for _ in range(2):
        with model.no_sync():
            model(tokens[0]).backward()
        assert resident_bytes(model) == only_kept
        assert same([shard.detach() for shard in model.parameters()], masters), "FP32 shards, unchanged"
    model(tokens[1]).backward()
    assert resident_bytes(model) == [0] * UNITS


# ---- B2: nobody may look between microbatches -----------------------------------------------------------


@each_policy
@PRECISIONS
@on_ranks(2)
def test_b2_parameters_can_be_read_between_microbatches(rank: int, precision: Precision, policy: Any) -> None:
    """There: state_dict() and summon_full_params() gather full tensors as if they were shards, and crash."""
    expected = {name: p.detach() for name, p in plain_net().named_parameters()}
    model, undisturbed = (build(precision=precision, **policy) for _ in range(2))
    for batches in data(rank, steps=2, count=3):
        for tokens in microbatches(model, batches):
            model(tokens).backward()
            assert_equal(model.state_dict(), expected)
            with model.summon_full_params():
                assert_equal({name: p.detach() for name, p in model.named_parameters()}, expected)
        backward(undisturbed, batches)
        assert same(grads_of(model), grads_of(undisturbed))
        for m in (model, undisturbed):
            m.zero_grad()


# ---- B3: gradient memory that nothing needs yet ---------------------------------------------------------


@FLAGS
@on_ranks(2)
def test_b3_gradient_memory_appears_with_the_first_gradient(rank: int, flag: bool) -> None:
    """There: the constructor, every evaluation and state_dict() allocate 4 bytes a parameter."""
    others = fp32_tensors()
    model = build(optimize_backward_concat=flag, precision=BF16)
    tokens = batches_of_all_ranks()[rank]
    assert gradient_buffers(model, others) == 0, "after construction"
    for grad_mode in (torch.no_grad, torch.inference_mode):
        with grad_mode():
            model.eval()(tokens[0])
        assert gradient_buffers(model, others) == 0, f"after a forward under {grad_mode.__name__}"
    model.state_dict()
    assert gradient_buffers(model, others) == 0, "after state_dict()"
    with model.no_sync():
        loss = model.train()(tokens[0])
        assert gradient_buffers(model, others) == 0, "after the first training forward"
        loss.backward()
    assert gradient_buffers(model, others) == UNITS, "between microbatches"
    model(tokens[1]).backward()
    assert gradient_buffers(model, others) == 0, "after the reducing backward"


# ---- B4: frozen units -----------------------------------------------------------------------------------


@each_policy
@on_ranks(2)
def test_b4_a_frozen_unit_constructs_evaluates_and_trains(rank: int, policy: Any) -> None:
    """There: construction registers a gradient hook on what has no gradient, and raises."""
    plain = plain_net()
    plain.blocks[1].requires_grad_(False)
    model = auto_wrap(copy.deepcopy(plain), by_class(Block), **policy)
    batches = batches_of_all_ranks()
    tokens = batches[rank][0]
    for grad_mode in (torch.inference_mode, torch.no_grad, torch.enable_grad):
        with grad_mode():
            assert torch.equal(model(tokens), plain(tokens)), grad_mode.__name__
    backward(model, batches[rank])
    assert_equal(whole_grads(model), plain_grads(plain, batches))
    for frozen in model.blocks[1].parameters():
        assert frozen.grad is None
        assert getattr(frozen, "main_grad", None) is None
    torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1).step()
    state = model.state_dict()
    for name, value in plain.state_dict().items():
        assert torch.equal(state[name], value) == name.startswith("blocks.1."), name


@FLAGS
@on_ranks(2)
def test_b4_a_frozen_unit_is_freed_after_backward(rank: int, flag: bool) -> None:
    """There: its backward hook, which would free it, does not exist."""
    net = plain_net()
    net.blocks[1].requires_grad_(False)
    model = auto_wrap(net, by_class(Block), optimize_backward_concat=flag)
    with model.no_sync():
        model(batches_of_all_ranks()[rank][0]).backward()
    assert resident_bytes(model) == [0] * UNITS


# ---- B5, B6: who says which microbatch is the last, and when --------------------------------------------


def on_the_root(model: FlatFSDP, is_last: bool) -> None:
    model.set_is_last_backward(is_last)


def on_every_unit(model: FlatFSDP, is_last: bool) -> None:
    for _, wrapped in units_in(model):
        wrapped.set_is_last_backward(is_last)


def by_attribute(model: FlatFSDP, is_last: bool) -> None:
    for _, wrapped in units_in(model):
        wrapped.fsdp_state.shared.microbatch.is_last = is_last


@pytest.mark.parametrize("mark", [on_the_root, on_every_unit, by_attribute], ids=lambda f: f.__name__)
@pytest.mark.parametrize(
    "flags",
    [
        (False,) * 4,
        (True,) * 4,
        (False, True, True, True),
        (True, False, False, False),
        (False, True, False, True),
    ],
    ids=lambda flags: "-".join("on" if flag else "off" for flag in flags),
)
@on_ranks(2)
def test_b5_no_microbatch_is_lost_when_the_last_one_is_marked_by_hand(
    rank: int, flags: Sequence[bool], mark: Callable[[FlatFSDP, bool], None]
) -> None:
    """There: a second copy of the mark is not set, or the units' flags differ, and earlier gradients go."""
    plain = plain_net()
    net = copy.deepcopy(plain)
    root_flag, *block_flags = flags
    for index, flag in enumerate(block_flags):
        net.blocks[index] = FlatFSDP(net.blocks[index], optimize_backward_concat=flag)
    model = FlatFSDP(net, optimize_backward_concat=root_flag)
    batches = batches_of_all_ranks()
    expected = plain_grads(plain, batches)
    for _ in range(2):
        for index, tokens in enumerate(batches[rank]):
            mark(model, index == len(batches[rank]) - 1)
            model(tokens).backward()
        assert_equal(whole_grads(model), expected)
        model.zero_grad()


@each_policy
@on_ranks(2)
def test_b6_what_counts_is_the_mark_at_backward(rank: int, policy: Any) -> None:
    """There: another mark at forward than at backward fails an assertion, so GPipe schedules cannot run.

    All forwards first, under every pattern of marks; the backwards are marked as they should be.
    """
    model = build(**policy)
    batches = batches_of_all_ranks()
    expected = plain_grads(plain_net(), batches)
    for marks in product((False, True), repeat=len(batches[rank])):
        losses = []
        for is_last, tokens in zip(marks, batches[rank], strict=True):
            with nullcontext() if is_last else model.no_sync():
                losses.append(model(tokens))
        for index, loss in enumerate(losses):
            model.set_is_last_backward(index == len(losses) - 1)
            loss.backward()
        assert_equal(whole_grads(model), expected)
        model.zero_grad()


# ---- B7: hooks on weights, also of units that are used twice --------------------------------------------


class Twice(Net):
    """Every block runs twice, and its two gradients are added up by autograd in the compute dtype."""

    def logits(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in (*self.blocks, *self.blocks):
            x = block(x)
        return self.head(x)


class Hooked(Twice):
    """A model whose hooks multiply one weight's gradient by 10, and clamp and count another's."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch.Size] = []
        self.blocks[0].up.weight.register_hook(lambda grad: grad * 10)
        self.blocks[1].up.weight.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
        self.blocks[1].up.weight.register_hook(lambda grad: self.seen.append(grad.shape))


@FLAGS
@PRECISIONS
@on_ranks(2)
def test_b7_hooks_on_weights_see_and_change_the_gradient_that_is_reduced(
    rank: int, precision: Precision, flag: bool
) -> None:
    """There: a user's hook runs after the gradient has been accumulated, and changes nothing."""
    net, plain = plain_net(Hooked), plain_net(Hooked)
    model = auto_wrap(net, by_class(Block), optimize_backward_concat=flag, precision=precision)
    batches = batches_of_all_ranks()
    backward(model, batches[rank])
    assert net.seen == [plain.blocks[1].up.weight.shape] * len(batches[rank]), "once a microbatch, whole"
    if precision == BF16:
        plain.bfloat16()
    assert_equal(whole_grads(model), plain_grads(plain, batches))


# ---- B8: a unit used twice in one graph -----------------------------------------------------------------


@each_policy
@on_ranks(2)
def test_b8_a_unit_may_be_used_twice_in_one_graph(rank: int, policy: Any) -> None:
    """There: an assertion fails in mixed precision, because the buffer has been handed over already."""
    net = plain_net(Twice)
    full_precision, low_precision = copy.deepcopy(net), copy.deepcopy(net).bfloat16()
    model = auto_wrap(net, by_class(Block), precision=BF16, **policy)
    batches = batches_of_all_ranks()
    backward(model, batches[rank])
    ours, exact = whole_grads(model), plain_grads(full_precision, batches)
    assert_equal(ours, plain_grads(low_precision, batches))
    error = [ours[name] - exact[name] for name in exact]
    relative_error = torch.nn.utils.get_total_norm(error) / torch.nn.utils.get_total_norm([*exact.values()])
    assert relative_error < 0.05


# ---- B9: several flat groups, any device ----------------------------------------------------------------


@FLAGS
@on_ranks(2)
def test_b9_trained_and_frozen_groups_of_one_unit_are_kept_apart(rank: int, flag: bool) -> None:
    """There: all groups share one gradient buffer, on CUDA's current device, and the first one gets it."""
    plain = plain_net()
    for block in plain.blocks:
        block.norm.requires_grad_(False)
        block.up.bias.requires_grad_(False)
    batches = batches_of_all_ranks()
    no_device = mock.patch("torch.cuda.current_device", side_effect=AssertionError("a hard-coded device"))
    with no_device:
        model = auto_wrap(copy.deepcopy(plain), by_class(Block), optimize_backward_concat=flag)
        backward(model, batches[rank])
    assert_equal(whole_grads(model), plain_grads(plain, batches))
    frozen = [p for block in model.blocks for p in (*block.norm.parameters(), block.up._parameters["bias"])]
    assert len(frozen) == 9 and all(p.grad is None and not p.requires_grad for p in frozen)


def test_b9_each_flat_parameter_of_a_wrapper_gets_its_own_gradient() -> None:
    """There: all groups share one gradient buffer, too."""
    plain = plain_net()
    net = copy.deepcopy(plain)
    wrapped = FlattenParamsWrapper(net, [list(part.parameters()) for part in net.children()])
    assert len(wrapped.flat_params) == 3
    tokens = batches_of_all_ranks()[0][0]
    for module in (wrapped, plain):
        module(tokens).backward()
    grads = wrapped.get_param_views([flat.grad for flat in wrapped.flat_params])
    assert same(grads, [p.grad for p in plain.parameters()])


# ---- B10: concatenation ---------------------------------------------------------------------------------


@FLAGS
@RESHARD
@PRECISIONS
@on_ranks(2)
def test_b10_nothing_is_concatenated_with_the_flag(
    rank: int, precision: Precision, reshard: bool, flag: bool
) -> None:
    """There: the last microbatch concatenates all gradients, and throws the result away.

    Per microbatch, what the profiler sees in backward; and concats in the engine's own account.
    """
    count = 0 if flag else UNITS
    model = build(optimize_backward_concat=flag, precision=precision, reshard_after_forward=reshard)
    seen = []
    for tokens in microbatches(model, batches_of_all_ranks()[rank]):
        loss = model(tokens)
        with profile() as trace:
            loss.backward()
        names = [event.name for event in trace.events()]
        seen.append({name: names.count(name) for name in ("aten::cat", "SplitWithSizesBackward0")})
    assert seen == [{"aten::cat": count, "SplitWithSizesBackward0": count}] * 3
    assert model.fsdp_state.shared.ledger.calls["concat"] == 3 * count
