"""`optimizer.zero_grad()` drops accumulated gradients; nothing takes their marker for a gradient."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flatfsdp.optim
from flatfsdp import Precision, checkpoint, microbatches, param_groups
from tests.support.against_plain import assert_equal
from tests.support.models import FLAGS, backward, build, data, same, update, whole_grads
from tests.support.ranks import on_ranks

SYNC = pytest.mark.parametrize("sync", ["last", "every"])

BF16 = torch.bfloat16
WIDE = Precision(param=BF16, compute=BF16, grad=torch.float32)


def accumulate(model: Any, tokens: Tensor) -> None:
    with model.no_sync():
        model(tokens).backward()


def optimizers(model: Any) -> dict[str, torch.optim.Optimizer]:
    parameters = list(model.parameters())
    return {
        "sgd": torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        "foreach": torch.optim.AdamW(parameters, lr=0.1, foreach=True),
        "single": torch.optim.AdamW(parameters, lr=0.1, foreach=False),
        "ours": flatfsdp.optim.AdamW(parameters, lr=0.1),
        "clipping": flatfsdp.optim.SGD(parameters, lr=0.1, max_grad_norm=1.0),
    }


@FLAGS
@SYNC
@pytest.mark.parametrize("reshard", [False, True], ids=["zero2", "zero3"])
@on_ranks(1, 2)
def test_zero_grad_of_an_optimizer_drops_what_is_accumulated(
    rank: int, reshard: bool, sync: str, flag: bool
) -> None:
    options = {"optimize_backward_concat": flag, "grad_sync": sync, "reshard_after_forward": reshard}
    ((bad, worse, *good),) = data(rank, 1, 4)
    fresh = build(**options)
    backward(fresh, good)
    expected = whole_grads(fresh)
    for to_none in (True, False):
        for name in optimizers(build(**options)):
            model = build(**options)
            optimizer = optimizers(model)[name]
            accumulate(model, bad)
            accumulate(model, worse)
            optimizer.zero_grad(set_to_none=to_none)
            backward(model, good)
            assert_equal(whole_grads(model), expected)
            # Without zero_grad both add up.
            backward(model, good)
            assert_equal(whole_grads(model), {key: 2 * grad for key, grad in expected.items()})


@FLAGS
@on_ranks(2)
def test_zero_grad_between_a_forward_and_its_backward(rank: int, flag: bool) -> None:
    """Some trainers call zero_grad right before the backward."""
    ((bad, good),) = data(rank, 1, 2)
    model, fresh = (build(optimize_backward_concat=flag) for _ in range(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accumulate(model, bad)
    loss = model(good)
    optimizer.zero_grad()
    loss.backward()
    fresh(good).backward()
    assert_equal(whole_grads(model), whole_grads(fresh))


@FLAGS
@SYNC
@on_ranks(1, 2)
def test_a_gradient_from_an_earlier_step_is_watched(rank: int, sync: str, flag: bool) -> None:
    """A gradient that is there already is watched itself; clipping it drops nothing."""
    options = {"optimize_backward_concat": flag, "grad_sync": sync}
    ((first, bad, good),) = data(rank, 1, 3)
    only = build(**options)
    only(good).backward()
    expected = whole_grads(only)
    for to_none in (True, False):
        model = build(**options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(first).backward()
        accumulate(model, bad)
        optimizer.zero_grad(set_to_none=to_none)
        model(good).backward()
        assert_equal(whole_grads(model), expected)
    model, plain = build(**options), build(**options)
    model(first).backward()
    accumulate(model, bad)
    model.clip_grad_norm_(0.5)
    model(good).backward()
    plain(first).backward()
    plain.clip_grad_norm_(0.5)
    accumulate(plain, bad)
    plain(good).backward()
    assert_equal(whole_grads(model), whole_grads(plain))


@FLAGS
@on_ranks(1, 2)
def test_a_step_before_the_last_backward_raises(rank: int, flag: bool) -> None:
    """A step, a norm or a scaler in the middle of a step raises, and changes nothing."""
    ((first, second),) = data(rank, 1, 2)
    for name in optimizers(build()):
        model, fresh = (build(optimize_backward_concat=flag) for _ in range(2))
        optimizer = optimizers(model)[name]
        before = [p.detach().clone() for p in model.parameters()]
        accumulate(model, first)
        with pytest.raises(RuntimeError, match="accumulated and not yet reduced"):
            optimizer.step()
        assert same(before, list(model.parameters()))
        assert not any(optimizer.state.values())
        for clip in (model.clip_grad_norm_, partial(nn.utils.clip_grad_norm_, model.parameters())):
            with pytest.raises(RuntimeError, match="accumulated and not yet reduced"):
                clip(1.0)
        model.state_dict()
        checkpoint.full_optimizer_state_dict(model, optimizer)
        assert "not yet reduced" in repr(next(model.parameters()).grad)
        model(second).backward()
        accumulate(fresh, first)
        fresh(second).backward()
        assert_equal(whole_grads(model), whole_grads(fresh))
        # Zeroed: there are no gradients, as in PyTorch.
        update(optimizer)
        accumulate(model, first)
        optimizer.zero_grad()
        after = [p.detach().clone() for p in model.parameters()]
        optimizer.step()
        assert same(after, list(model.parameters()))


@FLAGS
@on_ranks(1, 2)
def test_gradients_in_main_grad(rank: int, flag: bool) -> None:
    """The marker is in `.grad`, in its dtype, even if the reduced gradient is in `main_grad`."""
    ((bad, good),) = data(rank, 1, 2)
    model, fresh = (build(precision=WIDE, optimize_backward_concat=flag) for _ in range(2))
    for zero_grad in (torch.optim.SGD(model.parameters()).zero_grad, model.zero_grad):
        accumulate(model, bad)
        zero_grad()
        model(good).backward()
        fresh(good).backward()
        assert_equal(whole_grads(model), whole_grads(fresh))
        assert all(p.grad is None for p in model.parameters())
        model.zero_grad()
        fresh.zero_grad()
    accumulate(model, bad)
    with pytest.raises(RuntimeError, match="accumulated and not yet reduced"):
        flatfsdp.optim.AdamW(model.parameters()).step()


@FLAGS
@on_ranks(1, 2)
def test_shards_of_parameter_groups_have_markers(rank: int, flag: bool) -> None:
    ((bad, good),) = data(rank, 1, 2)
    groups = [{"params": lambda name, shape: len(shape) < 2, "weight_decay": 0.0}]
    found = []
    for zeroes in (True, False):
        model = build(optimize_backward_concat=flag)
        optimizer = torch.optim.AdamW(param_groups(model, groups), lr=0.1)
        if zeroes:
            accumulate(model, bad)
            with pytest.raises(RuntimeError, match="accumulated and not yet reduced"):
                optimizer.step()
            optimizer.zero_grad()
        model(good).backward()
        found.append(whole_grads(model))
    assert_equal(*found)


@on_ranks(2)
def test_an_offloaded_model(rank: int) -> None:
    ((bad, good),) = data(rank, 1, 2)
    model, fresh = (build(cpu_offload=True, precision=Precision(compute=BF16)) for _ in range(2))
    accumulate(model, bad)
    torch.optim.SGD(model.parameters()).zero_grad()
    model(good).backward()
    fresh(good).backward()
    assert_equal(whole_grads(model), whole_grads(fresh))


def leave_a_loop(model: Any, batches: list[Tensor]) -> None:
    for tokens in microbatches(model, batches):
        model(tokens).backward()
        return


def fail(model: Any, batches: list[Tensor]) -> None:
    accumulate(model, batches[0])
    with pytest.raises(IndexError):
        model(torch.full((1, 1), 1000))


@pytest.mark.parametrize("leave", [leave_a_loop, fail])
def test_no_marker_is_left_of_a_step_that_has_ended(leave: Callable[..., None]) -> None:
    model = build()
    batches = next(data(0, 1, 2))
    leave(model, batches)
    with torch.no_grad():
        # Until then, a marker lets an optimizer's step raise.
        model(batches[0])
    assert all(p.grad is None for p in model.parameters())


def test_a_marker_takes_no_memory_and_keeps_nothing() -> None:
    model = build()
    parameters = list(model.parameters())
    rows = model.memory_report().rows
    accumulate(model, next(data(0, 1, 1))[0])
    assert model.memory_report().rows == rows
    with torch._C.DisableTorchFunctionSubclass():
        for parameter in parameters:
            assert parameter.grad.untyped_storage().nbytes() == parameter.element_size()
            assert parameter.grad.shape == parameter.shape and parameter.grad.dtype == parameter.dtype
    kept = [weakref.ref(parameter) for parameter in parameters]
    del model, parameters, parameter
    gc.collect()
    assert not any(reference() is not None for reference in kept)
