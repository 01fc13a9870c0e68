"""Checks of scales and amaxes name the tensor that does not fit."""

from __future__ import annotations

import pytest
import torch

from flatfsdp.kernels.shared.outputs import check_scalars


@pytest.mark.parametrize(
    "wrong", [torch.ones(2), torch.ones(1, dtype=torch.float16), torch.ones(1, device="meta")]
)
def test_the_first_that_does_not_fit_is_named(wrong: torch.Tensor) -> None:
    x, right = torch.ones(4, 4), torch.ones(1)
    check_scalars(x, ("scale", right), ("amax", None))
    with pytest.raises(ValueError, match=r"amax is .*one FP32 number on cpu"):
        check_scalars(x, ("scale", right), ("amax", wrong))
