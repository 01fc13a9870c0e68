"""Functions that PyTorch computes in another way on the meta device than on a GPU.

In:   calls of PyTorch's functions.
Out:  the operators that a GPU would run, with what they keep for the backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from flatfsdp.plan.any_model.attention import fused_attention


def _fused_dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Keeps a mask of one byte an element; elsewhere PyTorch keeps one of the input's dtype."""
    out, _ = torch.native_dropout(input, p, training)
    return input.copy_(out) if inplace else out


_REPLACEMENTS: dict[Callable[..., Any], Callable[..., Tensor]] = {
    F.scaled_dot_product_attention: fused_attention,
    F.dropout: _fused_dropout,
}


class GPUFunctions(TorchFunctionMode):
    """Inside, functions of tensors on the meta device are computed as on a GPU."""

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function in _REPLACEMENTS and args and args[0].is_meta:
            function = _REPLACEMENTS[function]
        return function(*args, **(kwargs or {}))
