"""Policies are validated when they are made, with messages that name the field, and cannot change later."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from flatfsdp.policy import Policy, Precision, Prefetch

DTYPE_FIELDS = ["param", "compute", "accumulate", "reduce", "grad", "buffer"]


def make_policy(**changes) -> Policy:
    choices = {
        "precision": Precision(),
        "reshard_after_forward": True,
        "optimize_backward_concat": False,
        "grad_sync": "last",
        "prefetch": Prefetch(),
        "cpu_offload": False,
        "check_collectives": True,
        "poison_on_free": False,
    }
    return Policy(**{**choices, **changes})


@pytest.mark.parametrize("field", DTYPE_FIELDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_precision_takes_the_plain_floating_point_dtypes(field, dtype):
    assert getattr(Precision(**{field: dtype}), field) is dtype


@pytest.mark.parametrize("field", DTYPE_FIELDS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.float8_e4m3fn, torch.complex64, "bf16", 32])
def test_precision_rejects_other_dtypes_and_names_the_field(field, dtype):
    with pytest.raises(ValueError, match=rf"Precision\.{field} is .*must be one of torch\.float32"):
        Precision(**{field: dtype})


def test_only_the_dtypes_of_gradient_and_buffers_may_be_none():
    assert Precision(buffer=None).buffer is None
    assert Precision(grad=None).grad is None
    for field in DTYPE_FIELDS[:-2]:
        with pytest.raises(ValueError, match=rf"Precision\.{field} is None"):
            Precision(**{field: None})


def test_accumulation_is_fp32_unless_asked_otherwise():
    """bf16 compute must not silently accumulate in bf16 (256 + 1 would be 256)."""
    assert Precision(compute=torch.bfloat16).accumulate is torch.float32


@pytest.mark.parametrize("field", ["forward", "backward"])
@pytest.mark.parametrize("depth", [-1, 1.5, None, "1"])
def test_prefetch_rejects_what_is_no_depth(field, depth):
    with pytest.raises(ValueError, match=rf"Prefetch\.{field} is .*integer >= 0"):
        Prefetch(**{field: depth})


def test_prefetch_zero_turns_it_off():
    assert Prefetch(forward=0, backward=0) == Prefetch(0, 0)


@pytest.mark.parametrize("value", ["last", "every"])
def test_grad_sync_takes_its_two_values(value):
    assert make_policy(grad_sync=value).grad_sync == value


@pytest.mark.parametrize("value", ["first", "LAST", None, True])
def test_grad_sync_rejects_the_rest(value):
    with pytest.raises(ValueError, match=r"grad_sync is .*must be one of \('last', 'every'\)"):
        make_policy(grad_sync=value)


@pytest.mark.parametrize(
    ("policy", "field"),
    [(Precision(), "param"), (Prefetch(), "forward"), (make_policy(), "grad_sync")],
)
def test_policies_are_frozen(policy, field):
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(policy, field, None)
