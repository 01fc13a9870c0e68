"""What `verify` calls equal: the same bits, and nothing less."""

import pytest
import torch

from flatfsdp.cli.evidence import first_difference


def test_equal_tensors_have_no_difference() -> None:
    a = {"x": torch.randn(5), "y": torch.tensor(3)}
    assert first_difference(a, {name: tensor.clone() for name, tensor in a.items()}) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_bit_is_found_and_counted(dtype: torch.dtype) -> None:
    a = torch.ones(6, dtype=dtype)
    b = a.clone()
    b[2] = torch.nextafter(b[2], torch.tensor(2.0, dtype=dtype))
    same = torch.zeros(1)
    assert first_difference({"s": same, "x": a}, {"s": same, "x": b}) == "x: 1 of 6 elements"


def test_the_sign_of_zero_counts() -> None:
    a, b = torch.zeros(3), torch.tensor([0.0, -0.0, 0.0])
    assert torch.equal(a, b)
    assert first_difference({"x": a}, {"x": b}) == "x: 1 of 3 elements"


def test_nan_equals_nothing_not_even_itself() -> None:
    a = {"x": torch.tensor([1.0, float("nan")])}
    assert first_difference(a, a) == "x: 1 NaN with the switch off, 1 with it on"


def test_a_missing_tensor_or_another_shape_is_a_difference() -> None:
    x = torch.zeros(2)
    assert first_difference({"x": x, "y": x}, {"x": x}) == "only one run has y"
    assert first_difference({"x": x}, {"x": torch.zeros(3)}) is not None
