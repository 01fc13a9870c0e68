"""What is called equal: the same bits, and nothing less."""

import pytest
import torch

from flatfsdp.parity import evidence
from flatfsdp.parity.evidence import Kept, NamedTensors


def first_difference(off: dict[str, torch.Tensor], on: dict[str, torch.Tensor]) -> str | None:
    return evidence.first_difference(_kept(off), _kept(on))


def _kept(tensors: dict[str, torch.Tensor]) -> NamedTensors:
    return {name: Kept(tensor) for name, tensor in tensors.items()}


def test_equal_tensors_have_no_difference() -> None:
    a = {"x": torch.randn(5), "y": torch.tensor(3)}
    assert first_difference(a, {name: tensor.clone() for name, tensor in a.items()}) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_bit_is_found_and_counted(dtype: torch.dtype) -> None:
    a = torch.ones(6, dtype=dtype)
    b = a.clone()
    b[2] = torch.nextafter(b[2], torch.tensor(2.0, dtype=dtype))
    same = torch.zeros(1)
    found = first_difference({"s": same, "x": a}, {"s": same, "x": b})
    assert found is not None and found.startswith("x: 1 of 6 elements, the first 1.0 and 1.0")


def test_the_sign_of_zero_counts() -> None:
    a, b = torch.zeros(3), torch.tensor([0.0, -0.0, 0.0])
    assert torch.equal(a, b)
    assert first_difference({"x": a}, {"x": b}) == "x: 1 of 3 elements, the first 0.0 and -0.0"


def test_nan_equals_nothing_not_even_itself() -> None:
    a = {"x": torch.tensor([1.0, float("nan")])}
    assert first_difference(a, a) == "x: 1 NaN with the switch off, 1 with it on"


def test_a_missing_tensor_or_another_shape_is_a_difference() -> None:
    x = torch.zeros(2)
    assert first_difference({"x": x, "y": x}, {"x": x}) == "only one run has y"
    assert first_difference({"x": x}, {"x": torch.zeros(3)}) is not None


def test_the_first_element_that_differs_is_named_by_its_place_in_the_parameter() -> None:
    """A rank's part: the end of a matrix."""
    off = torch.arange(4.0)
    for element, place in ((0, "[2, 0]: 0.0 and"), (2, "[2, 2]: 2.0 and")):
        on = off.clone()
        on[element:] += 1
        found = evidence.first_difference({"x": Kept(off, (3, 4), 8)}, {"x": Kept(on, (3, 4), 8)})
        assert found is not None and found.startswith(f"x: {4 - element} of 4 elements, the first {place}")
