"""Bugs P1 to P8 of fairscale's FSDP, with either flag, which do not occur here.

fairscale is read at branch `ngoyal_changes_for_pp_fp8_jiecaoyu_free_fp16_shard`; each test says what happens
there.  `test_flag.py` has the bugs of `optimize_backward_concat`.
"""

from __future__ import annotations

import copy
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import flatfsdp
from flatfsdp import FlatFSDP, FlattenParamsWrapper, Precision, Prefetch, auto_wrap, by_class, microbatches
from flatfsdp.engine.whole.units import distinct_units
from tests.support.against_plain import UNITS, assert_equal, batches_of_all_ranks, plain_grads, resident_bytes
from tests.support.gpu.waiting import without_synchronisation
from tests.support.models import (
    FLAGS,
    RESHARD,
    Block,
    Net,
    RecomputedNet,
    backward,
    data,
    plain_net,
    update,
    whole_grads,
)
from tests.support.models import wrapped as build
from tests.support.ranks import on_ranks, run_ranks

GRAD_DTYPES = pytest.mark.parametrize("grad", [torch.float32, None], ids=["main_grad", "grad"])
BF16 = torch.bfloat16


def bf16_parameters(grad: torch.dtype | None) -> Precision:
    """Master shards in bf16; with `grad=torch.float32` their gradients are in `main_grad`."""
    return Precision(param=BF16, compute=BF16, grad=grad)


class Watch(TorchDispatchMode):
    """Calls `seen(operator, arguments)` for every operator below autograd, collectives included."""

    def __init__(self, seen: Callable[[Any, Any], None]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen(func, args)
        return func(*args, **(kwargs or {}))


# ---- P1: recomputation gathers units that nobody frees --------------------------------------------------


def plain_losses(rank: int, world_size: int, steps: int) -> list[Tensor]:
    """This rank's losses when one process computes all gradients; large steps, so that staleness shows."""
    net = plain_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    losses = []
    for batches in zip(*(data(r, steps, 1) for r in range(world_size)), strict=True):
        losses.append(net(batches[rank][0]).detach())
        for name, grad in plain_grads(net, batches).items():
            net.get_parameter(name).grad = grad
        optimizer.step()
    return losses


@FLAGS
@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
@on_ranks(2)
def test_p1_checkpointing_around_units_trains_on_fresh_weights(
    rank: int, world_size: int, reentrant: bool, depth: int, flag: bool
) -> None:
    """There: recomputation prefetches a unit that is done; it stays, and serves the next step, outdated."""
    net = plain_net(partial(RecomputedNet, reentrant))
    options = {"optimize_backward_concat": flag, "prefetch": Prefetch(depth, depth)}
    model = auto_wrap(net, by_class(Block), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    expected = plain_losses(rank, world_size, steps=6)
    for batches, plain_loss in zip(data(rank, 6, 1), expected, strict=True):
        loss = model(batches[0])
        assert torch.equal(loss, plain_loss)
        gathers = model.fsdp_state.shared.ledger.calls["gather"]
        loss.backward()
        assert model.fsdp_state.shared.ledger.calls["gather"] - gathers == UNITS - 1, (
            "once a block; the root is still there"
        )
        assert resident_bytes(model) == [0] * UNITS
        update(optimizer)


# ---- P2: a world of one never drops its gradients -------------------------------------------------------


def steps_in_a_world_of_one(rank: int, world_size: int, flag: bool, precision: Precision) -> None:
    """Runs steps without updates, with only `optimizer.zero_grad()` between them."""
    net = plain_net()
    model = auto_wrap(copy.deepcopy(net), by_class(Block), optimize_backward_concat=flag, precision=precision)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    if precision.compute == BF16:
        net.bfloat16()
    for batches in data(rank, steps=3, count=2):
        backward(model, batches)
        assert_equal(whole_grads(model), plain_grads(net, [batches]))
        update(optimizer)


@FLAGS
@pytest.mark.parametrize("precision", [Precision(), Precision(compute=BF16)], ids=["fp32", "bf16"])
@pytest.mark.parametrize("initialised", [True, False], ids=["one rank", "no torch.distributed"])
def test_p2_a_world_of_one_starts_each_step_from_zero(initialised: bool, precision: Any, flag: bool) -> None:
    """There: gradients add up over steps, norms 3.5, 7.1, 10.6."""
    if initialised:
        run_ranks(1, steps_in_a_world_of_one, flag, precision)
    else:
        steps_in_a_world_of_one(0, 1, flag, precision)


# ---- P3, P4: gradients of bf16 parameters ---------------------------------------------------------------


def assert_grads_are_where_they_belong(model: FlatFSDP, grad: torch.dtype | None) -> None:
    for shard in model.parameters():
        assert shard.dtype == BF16
        reduced = shard.grad if grad is None else shard.main_grad
        assert (reduced.dtype, reduced.shape) == (grad or BF16, shard.shape)
        assert grad is None or shard.grad is None


@FLAGS
@GRAD_DTYPES
@on_ranks(2)
def test_p3_clipping_sees_the_gradients_of_bf16_parameters(rank: int, grad: Any, flag: bool) -> None:
    """There: the norm looks at `.grad` only, finds 0.0 and clips nothing."""
    model = build(optimize_backward_concat=flag, precision=bf16_parameters(grad))
    batches = batches_of_all_ranks()
    backward(model, batches[rank])
    assert_grads_are_where_they_belong(model, grad)
    reduced = whole_grads(model)
    exact = plain_grads(plain_net().bfloat16(), batches)
    assert_equal(reduced, {name: g.to(grad or BF16) for name, g in exact.items()})

    norm = model.clip_grad_norm_(0.1)
    true_norm = torch.nn.utils.get_total_norm([g.float() for g in reduced.values()])
    torch.testing.assert_close(norm, true_norm, rtol=1e-5, atol=0)
    assert_grads_are_where_they_belong(model, grad)
    precision = 1e-5 if grad == torch.float32 else 1e-2
    for name, clipped in whole_grads(model).items():
        expected = reduced[name].float() * (0.1 / true_norm)
        torch.testing.assert_close(clipped.float(), expected, rtol=precision, atol=1e-6, msg=name)
    model.zero_grad(set_to_none=False)
    assert not any(zeros.any() for zeros in whole_grads(model).values())
    model.zero_grad()
    assert all(p.grad is None and getattr(p, "main_grad", None) is None for p in model.parameters())


@FLAGS
@GRAD_DTYPES
@on_ranks(2)
def test_p4_gradients_of_bf16_parameters_add_up_without_no_sync(rank: int, grad: Any, flag: bool) -> None:
    """There: each backward overwrites `main_grad`, so that all microbatches but the last are lost.

    Every backward reduces: first the same batch three times, then, from zero, different ones.
    """
    model = build(optimize_backward_concat=flag, precision=bf16_parameters(grad))
    same_batch, *others = batches_of_all_ranks()[rank]
    model(same_batch).backward()
    once = whole_grads(model)
    model(same_batch).backward()
    twice = whole_grads(model)
    assert_equal(twice, {name: 2 * g for name, g in once.items()})
    model(same_batch).backward()
    assert_equal(whole_grads(model), {name: twice[name] + g for name, g in once.items()})
    assert_grads_are_where_they_belong(model, grad)

    parts = []
    for batches in ([others[0]], [others[1]], others):
        model.zero_grad()
        for tokens in batches:
            model(tokens).backward()
        parts.append(whole_grads(model))
    assert_equal(parts[2], {name: parts[0][name] + parts[1][name] for name in once})


# ---- P5: the host waits for the device ------------------------------------------------------------------


def no_reads(operator: Any, _arguments: Any) -> None:
    """Raises where a value of a tensor goes to the host: `item()`, `if tensor:`, `tolist()`."""
    assert operator is not torch.ops.aten._local_scalar_dense.default, "the host reads a tensor"


@contextmanager
def host_never_waits(device: str) -> Iterator[None]:
    waits = ("torch.cuda.synchronize", "torch.cuda.Stream.synchronize", "torch.cuda.Event.synchronize")
    with ExitStack() as stack:
        for wait in waits:
            stack.enter_context(mock.patch(wait, side_effect=AssertionError(f"{wait} was called")))
        stack.enter_context(Watch(no_reads))
        if device == "cuda":
            stack.enter_context(without_synchronisation())
        yield


def steps_without_waiting(rank: int, world_size: int, device: str, options: dict[str, Any]) -> None:
    model = build(device=device, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = [[tokens.to(device) for tokens in batches] for batches in data(rank, steps=4, count=2)]

    def run(steps: list[list[Tensor]]) -> None:
        for batches in steps:
            backward(model, batches)
            model.clip_grad_norm_(1.0)
            update(optimizer)

    # The first steps create communicators and record the order of execution.
    run(steps[:2])
    with host_never_waits(device):
        run(steps[2:])


NEEDS_GPUS = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


@FLAGS
@RESHARD
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_GPUS)])
def test_p5_the_host_never_waits(device: str, reshard: bool, flag: bool) -> None:
    """There: the host waits for the device once per freed parameter."""
    precision = Precision(compute=BF16)
    options = {"optimize_backward_concat": flag, "reshard_after_forward": reshard, "precision": precision}
    backend = "nccl" if device == "cuda" else "gloo"
    run_ranks(2, steps_without_waiting, device, options, backend=backend)


# ---- P6: hooks pile up ----------------------------------------------------------------------------------


@contextmanager
def engine_calls() -> Iterator[Counter[str]]:
    """Counts the calls of each function of the engine, whoever calls it."""
    calls: Counter[str] = Counter()
    package = str(Path(flatfsdp.__file__).parent)

    def count(frame: Any, event: str, _arg: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(package):
            calls[frame.f_code.co_name] += 1

    sys.setprofile(count)
    try:
        yield calls
    finally:
        sys.setprofile(None)


@FLAGS
@RESHARD
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32 parameters", "bf16 parameters"])
@on_ranks(2)
def test_p6_a_backward_calls_as_many_hooks_as_the_one_before(
    rank: int, bf16: bool, reshard: bool, flag: bool
) -> None:
    """There: with bf16 parameters each forward adds a hook that stays, so microbatch k calls k a unit.

    Four steps of four microbatches; the first step has no recorded order to prefetch by.
    """
    precision = bf16_parameters(torch.float32) if bf16 else Precision()
    model = build(optimize_backward_concat=flag, reshard_after_forward=reshard, precision=precision)
    parameters = len(list(plain_net().parameters()))
    by_step = []
    for batches in data(rank, steps=4, count=4):
        counted = []
        for tokens in microbatches(model, batches):
            loss = model(tokens)
            with engine_calls() as calls:
                loss.backward()
            assert calls["landed"] == (parameters if flag else UNITS)
            counted.append(calls)
        assert counted[1] == counted[2], "neither the first nor the last microbatch of the step"
        by_step.append(counted)
        model.zero_grad()
    assert by_step[1] == by_step[2] == by_step[3]


# ---- P7: copies -----------------------------------------------------------------------------------------


def test_p7_a_flatten_params_wrapper_can_be_copied() -> None:
    """There: `copy.deepcopy` raises, because a FlatParameter cannot be built without its parameters.

    `tests/unit/flat/test_unflatten.py` trains copies of all kinds.
    """
    wrapped = FlattenParamsWrapper(plain_net())
    copied = copy.deepcopy(wrapped)
    assert_equal(copied.state_dict(), wrapped.state_dict())
    assert copied.flat_param is not wrapped.flat_param


@FLAGS
def test_p7_a_sharded_model_says_why_it_cannot_be_copied(flag: bool) -> None:
    """There: copies and pickles of a FlatParameter raise."""
    with pytest.raises(TypeError, match=r"cannot be copied.*copy the plain module before it is sharded"):
        copy.deepcopy(FlatFSDP(nn.Linear(2, 2), optimize_backward_concat=flag))


# ---- P8: shapes of reduce-scatters ----------------------------------------------------------------------


class OddSizes(Net):
    """Also a scalar, and a layer of two numbers, so that most ranks have nothing but padding."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.tiny = nn.Linear(1, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.tiny(self.scale * super().forward(tokens).view(1)).sum()


@FLAGS
@on_ranks(2, 3, 4)
def test_p8_gradients_of_any_size_are_reduced_as_flat_tensors(rank: int, world_size: int, flag: bool) -> None:
    """There: small gradients travel in a 2-D bucket, which gloo rejects."""
    plain = plain_net(OddSizes)
    model = auto_wrap(copy.deepcopy(plain), by_class(Block, nn.Linear), optimize_backward_concat=flag)
    batches = batches_of_all_ranks()
    reductions = []

    def record(operator: Any, arguments: Any) -> None:
        if operator is torch.ops.c10d._reduce_scatter_base_.default:
            reductions.append((arguments[0].shape, arguments[1].shape))

    with Watch(record):
        backward(model, batches[rank])
    assert len(reductions) == sum(len(unit.fsdp_state.groups) for unit in distinct_units(model))
    for shard, full in reductions:
        assert len(shard) == len(full) == 1
        assert full.numel() == world_size * shard.numel()
    torch.testing.assert_close(whole_grads(model), plain_grads(plain, batches))
