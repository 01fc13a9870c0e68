"""Both layouts of what a kernel has cast to FP8."""

from __future__ import annotations

import torch
from torch import Tensor


def check_layouts(expected: Tensor, rowwise: Tensor, columnwise: Tensor | None) -> None:
    """The same numbers as `expected`, and NaN in the same places; `columnwise` is transposed."""
    layouts = {"rowwise": rowwise} if columnwise is None else {"rowwise": rowwise, "columnwise": columnwise.T}
    for layout, found in layouts.items():
        torch.testing.assert_close(
            found.float(),
            expected.float(),
            rtol=0,
            atol=0,
            equal_nan=True,
            msg=lambda m, of=layout: f"{of}: {m}",
        )
