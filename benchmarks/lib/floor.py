"""A lower bound for the time of a layer on the same libraries: its GEMMs, its attention, its bytes."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import sdpa_kernel

from flatfsdp.kernels.gemm.gemm import scaled_mm
from flatfsdp.kernels.gemm.wgrad import wgrad
from lib.layers import LayerShape
from lib.llama import ATTENTION

BYTES_OF_HIDDEN = 92
"""Bytes per element that an FP8 layer with norms, residuals and a gelu moves outside of GEMMs and attention.

They are for each of its tokens * hidden elements, with ffn = 4 * hidden:

    forward   norm and cast                  read 2, write 1 + 1                          4
              cast of attention's result     read 2, write 1 + 1                          4
              residual addition, norm, cast  read 2 + 2, write 2 + 1 + 1                  8
              gelu and cast                  4 * (read 2, write 1 + 1)                   16
    backward  cast of both output gradients  2 * (read 2, write 1 + 1)                    8
              gelu and cast                  4 * (read 2 + 2, write 1 + 1)               24
              norms, residual gradient       2 * (read 2 + 2 + 2, write 2)               16
              cast of query, key, value      3 * (read 2, write 1 + 1)                   12
"""


def floors(shape: LayerShape, device: torch.device) -> dict[str, Callable[[], None]]:
    """The work to time: "gemms", "attention", "bytes", and "floor", which is all of them in sequence."""
    gemms, attention, moves = _gemms(shape, device), _attention(shape, device), _bytes(shape, device)

    def everything() -> None:
        gemms()
        attention()
        moves()

    return {"gemms": gemms, "attention": attention, "bytes": moves, "floor": everything}


def _gemms(shape: LayerShape, device: torch.device) -> Callable[[], None]:
    h, f, tokens = shape.hidden, shape.ffn, shape.tokens
    bf16, one = torch.bfloat16, torch.ones(1, device=device)

    def fp8(rows: int, cols: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(rows, cols, device=device).to(dtype)

    maps = []
    for out, inner in ((3 * h, h), (h, h), (f, h), (h, f)):
        e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
        maps.append(
            {
                "x": fp8(tokens, inner, e4m3),
                "x_t": fp8(inner, tokens, e4m3),
                "w": fp8(out, inner, e4m3),
                "w_t": fp8(inner, out, e4m3),
                "dy": fp8(tokens, out, e5m2),
                "dy_t": fp8(out, tokens, e5m2),
                "dw": torch.zeros(out, inner, device=device),
            }
        )

    def run() -> None:
        for m in maps:
            scaled_mm(m["x"], m["w"], one, one, bias=None, out_dtype=bf16, split_accumulator=False)
        for m in reversed(maps):
            scaled_mm(m["dy"], m["w_t"], one, one, bias=None, out_dtype=bf16, split_accumulator=True)
            wgrad(m["dw"], m["dy_t"], m["x_t"], first=False, dy_scale_inv=one, x_scale_inv=one)

    return run


def _attention(shape: LayerShape, device: torch.device) -> Callable[[], None]:
    size = (shape.batch, shape.heads, shape.seq, shape.hidden // shape.heads)
    q, k, v, dy = (torch.randn(size, device=device, dtype=torch.bfloat16) for _ in range(4))
    for tensor in (q, k, v):
        tensor.requires_grad_()

    def run() -> None:
        with sdpa_kernel(ATTENTION, set_priority=True):
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        torch.autograd.grad(y, (q, k, v), dy)

    return run


def _bytes(shape: LayerShape, device: torch.device) -> Callable[[], None]:
    # Two copies, each of which reads and writes two bytes per element.
    total = BYTES_OF_HIDDEN * shape.tokens * shape.hidden
    source = torch.randn(total // 8, device=device, dtype=torch.bfloat16)
    target = torch.empty_like(source)

    def run() -> None:
        for _ in range(2):
            target.copy_(source)

    return run
