"""Policies are validated when they are made, with messages that name the field."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flatfsdp.options import Debug, Policy, Precision, Prefetch
from tests.support.assertions import assert_raises


def make_policy(**changes: Any) -> Policy:
    choices: dict[str, Any] = {
        "precision": Precision(),
        "cast_inputs": True,
        "reshard_after_forward": True,
        "optimize_backward_concat": False,
        "grad_sync": "last",
        "prefetch": Prefetch(),
        "cpu_offload": False,
        "timeout": 60.0,
        "debug": Debug(),
    }
    return Policy(**{**choices, **changes})


@pytest.mark.parametrize(
    ("field", "dtype"),
    [
        ("param", torch.int32),
        ("compute", torch.float8_e4m3fn),
        ("accumulate", "bf16"),
        ("reduce", 32),
        ("grad", torch.complex64),
        ("buffer", torch.bool),
    ],
)
def test_precision_takes_plain_floating_point_dtypes_only(field: str, dtype: Any) -> None:
    with pytest.raises(ValueError, match=rf"Precision\.{field} is .*must be one of torch\.float32"):
        Precision(**{field: dtype})


@pytest.mark.parametrize("field", ["param", "compute", "accumulate", "reduce"])
def test_only_the_dtypes_of_gradient_and_buffers_may_be_none(field: str) -> None:
    with pytest.raises(ValueError, match=rf"Precision\.{field} is None"):
        Precision(**{"grad": None, "buffer": None, field: None})


def test_accumulation_is_fp32_unless_asked_otherwise() -> None:
    """bf16 compute must not silently accumulate in bf16 (256 + 1 would be 256)."""
    assert Precision(compute=torch.bfloat16).accumulate is torch.float32


@pytest.mark.parametrize("seconds", [0, -1.0, 1e-4, float("nan"), None])
def test_a_timeout_is_a_number_of_seconds(seconds: Any) -> None:
    assert_raises(ValueError, r"timeout is .*at least 0.001", make_policy, timeout=seconds)


@pytest.mark.parametrize(("field", "depth"), [("forward", -1), ("backward", 1.5), ("backward", None)])
def test_prefetch_rejects_what_is_no_depth(field: str, depth: Any) -> None:
    assert_raises(ValueError, rf"Prefetch\.{field} is .*integer >= 0", Prefetch, **{field: depth})


@pytest.mark.parametrize(
    ("field", "value", "error", "message"),
    [
        (
            "grad_sync",
            "LAST",
            ValueError,
            r"grad_sync is 'LAST'; it must be one of \('last', 'every', 'auto'\)",
        ),
        ("precision", torch.bfloat16, TypeError, r"precision is torch\.bfloat16; pass Precision\("),
        ("prefetch", 2, TypeError, r"prefetch is 2; pass Prefetch\("),
        ("debug", True, TypeError, r"debug is True; pass Debug\("),
    ],
)
def test_policy_names_what_it_rejects(field: str, value: Any, error: type[Exception], message: str) -> None:
    assert_raises(error, message, make_policy, **{field: value})


@pytest.mark.parametrize("field", ["check_collectives", "poison_on_free"])
def test_debug_takes_flags_only(field: str) -> None:
    assert_raises(TypeError, rf"Debug\.{field} is 1; it must be True or False", Debug, **{field: 1})
