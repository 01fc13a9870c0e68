from __future__ import annotations

import pytest
import torch

from flatfsdp.kernels.grad.accumulate import accumulate, bytes_moved


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("numel", [1, 5, 123, 4097])
def test_sum_over_microbatches_against_float64(numel: int, dtype: torch.dtype) -> None:
    grads = [torch.randn(numel).to(dtype) for _ in range(8)]
    target = torch.full((numel,), torch.nan)
    for index, grad in enumerate(grads):
        accumulate(target, grad, first=index == 0)
    expected = torch.stack(grads).double().sum(0)
    torch.testing.assert_close(target.double(), expected, rtol=0, atol=8 * 2**-23 * 8)


def test_the_first_write_keeps_negative_zero_and_ignores_what_was_there() -> None:
    target = torch.tensor([torch.nan, torch.inf])
    accumulate(target, torch.tensor([-0.0, 1.0], dtype=torch.bfloat16), first=True)
    assert torch.signbit(target[0])
    assert target[1] == 1.0


def test_bf16_gradients_are_widened_before_they_are_added() -> None:
    target = torch.empty(1)
    for index, value in enumerate([256.0, 1.0]):
        accumulate(target, torch.tensor([value], dtype=torch.bfloat16), first=index == 0)
    assert target.item() == 257.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_narrow_target_is_rounded_once(dtype: torch.dtype) -> None:
    grads, target = torch.randn(2, 4097).to(dtype), torch.empty(4097, dtype=torch.bfloat16)
    accumulate(target, grads[0], first=True)
    assert torch.equal(target, grads[0].bfloat16())
    expected = (target.float() + grads[1].float()).bfloat16()
    accumulate(target, grads[1], first=False)
    assert torch.equal(target, expected)


def test_bytes() -> None:
    target, grad = torch.empty(10), torch.empty(10, dtype=torch.bfloat16)
    assert bytes_moved(target, grad, first=True) == 10 * (4 + 2)
    assert bytes_moved(target, grad, first=False) == 10 * (2 * 4 + 2)
