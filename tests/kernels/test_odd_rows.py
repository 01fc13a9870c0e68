"""Every kernel that works on rows, with 5, 123 and 4097 of them, which no tile divides, nor the columns.

The tiles are those of the table; results are compared with float64, and on a GPU with a second launch.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from flatfsdp.kernels import activation, cross_entropy, dropout
from flatfsdp.kernels.attention import join, rope
from flatfsdp.kernels.cast import block_cast, cast, column_sum, transpose
from flatfsdp.kernels.grad import embedding
from flatfsdp.kernels.norm import backward as norm_backward
from flatfsdp.kernels.norm import forward as norm_forward
from flatfsdp.kernels.shared.outputs import Outputs
from tests.support import plain_layers as plain

COLS = 40
E4M3 = torch.float8_e4m3fn
FP8_ERROR = 0.04
"""Relative error of one rounding to E4M3, in the Frobenius norm."""
SUM_ERROR = 5e-6
"""The same for an FP32 sum over rows, whose terms cancel."""
OPERATORS: list[tuple[ModuleType, str, str]] = [
    (activation, "_activation_forward", "forward_launch"),
    (activation, "_activation_backward", "backward_launch"),
    (block_cast, "_cast_vectors", "vectors_launch"),
    (block_cast, "_cast_squares", "squares_launch"),
    (cast, "_cast", "launch"),
    (cast, "_max_abs", "max_abs_launch"),
    (column_sum, "_column_sum", "launch"),
    (cross_entropy, "_statistics", "statistics_launch"),
    (cross_entropy, "_grad", "grad_launch"),
    (dropout, "_dropout_forward", "forward_launch"),
    (dropout, "_dropout_backward", "backward_launch"),
    (embedding, "_embedding_grad", "launch"),
    (join, "_join_heads", "launch"),
    (norm_backward, "_norm_backward", "launch"),
    (norm_forward, "_norm_forward", "launch"),
    (rope, "_rope", "launch"),
    (transpose, "_transpose", "transpose_launch"),
]


def twice(launch: Callable[..., None]) -> Callable[..., None]:
    """Also launches with copies of all tensors, which have to end bit-equal."""

    def call(*args: Any) -> None:
        copies = [arg.clone() if isinstance(arg, Tensor) else arg for arg in args]
        launch(*args)
        launch(*copies)
        for ours, again in zip(args, copies, strict=True):
            if isinstance(ours, Tensor):
                assert torch.equal(ours.contiguous().view(torch.uint8), again.contiguous().view(torch.uint8))

    return call


@pytest.fixture(autouse=True)
def _launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches kernels on the CPU, too, instead of the references; twice on a GPU."""
    for module, operator, name in OPERATORS:
        launch = getattr(module, name)
        monkeypatch.setattr(module, operator, twice(launch) if torch.cuda.is_available() else launch)


def random(*shape: int, device: str, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, device=device).to(dtype)


def fp8_options(device: str) -> dict[str, Tensor | torch.dtype | bool]:
    scale, amax = torch.full((1,), 16.0, device=device), torch.zeros(1, device=device)
    return {"scale": scale, "amax": amax, "dtype": E4M3, "columnwise": True}


def check_outputs(found: Outputs, amax: Tensor, exact: Tensor) -> None:
    """Checks each form of a result that was cast with a scale of 16, and its amax."""
    assert found.out is not None and found.rowwise is not None and found.columnwise is not None
    assert plain.error(found.out, exact) < 1e-6
    assert plain.error(found.rowwise.double() / 16, exact.clamp(-28, 28)) < FP8_ERROR
    assert torch.equal(found.columnwise.view(torch.uint8), found.rowwise.view(torch.uint8).t())
    assert plain.error(amax, exact.abs().max()[None]) < 1e-6


def check_cast(rows: int, device: str) -> None:
    x, options = random(rows, COLS, device=device, dtype=torch.bfloat16), fp8_options(device)
    found = cast.cast(x, column_sum=torch.float32, **options)
    check_outputs(Outputs(x, found.rowwise, found.columnwise), options["amax"], x.double())
    assert plain.error(found.column_sum, x.double().sum(0)) < SUM_ERROR
    assert cast.max_abs(x).item() == x.double().abs().max().item()


def check_column_sum(rows: int, device: str) -> None:
    x = random(rows, COLS, device=device, dtype=torch.bfloat16)
    assert plain.error(column_sum.column_sum(x), x.double().sum(0)) < SUM_ERROR


def check_transpose(rows: int, device: str) -> None:
    q = random(rows, COLS, device=device).to(E4M3)
    assert torch.equal(transpose.transpose(q).double(), q.double().t())


def check_block_cast(rows: int, device: str) -> None:
    x = random(rows, COLS, device=device, dtype=torch.bfloat16)
    for block in ("1x128", "128x128"):
        found = block_cast.block_cast(x, block=block, rowwise=True, columnwise=True)
        for q, scale_inv, exact in (
            (found.rowwise, found.rowwise_scale_inv, x),
            (found.columnwise, found.columnwise_scale_inv, x.t()),
        ):
            height = 1 if block == "1x128" else 128
            spread = scale_inv.repeat_interleave(height, 0).repeat_interleave(128, 1)
            back = q.double() * spread[: q.shape[0], : q.shape[1]]
            assert plain.error(back, exact.double()) < FP8_ERROR


def check_norm(rows: int, device: str, rms: bool) -> None:
    x, residual, dy, extra = (random(rows, COLS, device=device) for _ in range(4))
    weight, shift = (random(COLS, device=device) for _ in range(2))
    bias, options = None if rms else shift, fp8_options(device)
    found = norm_forward.norm_forward(x, weight, bias, eps=1e-5, rms=rms, residual=residual, **options)
    assert torch.equal(found.summed, x + residual)
    leaves = [t.double().requires_grad_() for t in (found.summed, weight, shift)]
    exact = plain.norm(leaves[0], leaves[1], None if rms else leaves[2], rms=rms)
    check_outputs(Outputs(found.out, found.rowwise, found.columnwise), options["amax"], exact.detach())
    grads = norm_backward.norm_backward(
        dy, found.summed, weight, found.mean, found.rstd, rms=rms, d_residual=extra
    )
    dx, dweight, *dbias = torch.autograd.grad(exact, leaves[: 3 - rms], dy.double())
    assert plain.error(grads.dx, dx + extra) < 2e-6
    assert plain.error(grads.dweight, dweight) < SUM_ERROR
    assert grads.dbias is None if rms else plain.error(grads.dbias, dbias[0]) < SUM_ERROR


def check_layer_norm(rows: int, device: str) -> None:
    check_norm(rows, device, rms=False)


def check_rms_norm(rows: int, device: str) -> None:
    check_norm(rows, device, rms=True)


def check_gelu(rows: int, device: str, name: str = "gelu") -> None:
    width = 2 * COLS if name in activation.GATED else COLS
    x, dy = random(rows, width, device=device), random(rows, COLS, device=device)
    options, backward_options = fp8_options(device), fp8_options(device)
    wide = x.double().requires_grad_()
    exact = plain.activated(wide, name)
    found = activation.activation_forward(x, name, **options)
    check_outputs(found, options["amax"], exact.detach())
    (dx,) = torch.autograd.grad(exact, wide, dy.double())
    grads = activation.activation_backward(dy, x, name, column_sum=torch.float32, **backward_options)
    check_outputs(Outputs(grads.dx, grads.rowwise, grads.columnwise), backward_options["amax"], dx)
    assert plain.error(grads.column_sum, dx.sum(0)) < SUM_ERROR


def check_swiglu(rows: int, device: str) -> None:
    check_gelu(rows, device, "swiglu")


def check_dropout(rows: int, device: str) -> None:
    x, residual = (random(rows, COLS, device=device) for _ in range(2))
    bias, seed = random(COLS, device=device), torch.tensor(3, device=device)
    keep = dropout.keep_mask(x, 0.3, seed).double() / (1 - 0.3)
    found = dropout.dropout_forward(x, bias, residual, 0.3, seed)
    assert plain.error(found, residual + keep * (x.double() + bias)) < 1e-6
    grads = dropout.dropout_backward(x, 0.3, seed, column_sum=True)
    assert plain.error(grads.dx, keep * x) < 1e-6
    assert plain.error(grads.dbias, (keep * x).sum(0)) < SUM_ERROR


def check_rope(rows: int, device: str) -> None:
    x = random(rows, 1, 3, 24, device=device)
    angle = torch.randn(rows, 12, device=device).double()
    cos, sin = angle.cos().float(), angle.sin().float()
    a, b = x.double().chunk(2, -1)
    c, s = cos[:, None, None].double(), sin[:, None, None].double()
    exact = torch.cat([a * c - b * s, a * s + b * c], -1)
    turned = rope.rope(x, cos, sin)
    assert plain.error(turned, exact) < 1e-6
    assert plain.error(rope.rope(turned, cos, sin, inverse=True), x) < 1e-6


def check_join(rows: int, device: str) -> None:
    query, key, value = (random(rows, 1, heads, 24, device=device) for heads in (4, 2, 2))
    joined = join.join_heads(query, key, value, interleaved=False)
    assert torch.equal(joined, torch.cat([query, key, value], 2).flatten(2))


def check_embedding(rows: int, device: str) -> None:
    dy, ids = random(rows, COLS, device=device), torch.randint(50, (rows,), device=device)
    target = torch.full((50, COLS), torch.nan, device=device)
    embedding.embedding_grad(target, dy, ids, first=True)
    exact = torch.zeros(50, COLS, device=device, dtype=torch.float64).index_add_(0, ids, dy.double())
    assert plain.error(target, exact) < SUM_ERROR


def check_cross_entropy(rows: int, device: str) -> None:
    logits = random(rows, 131, device=device)
    targets, scale = torch.randint(131, (rows,), device=device), torch.rand(rows, device=device)
    wide = logits.double().requires_grad_()
    exact = F.cross_entropy(wide, targets, reduction="none")
    largest, total, own = cross_entropy.cross_entropy_statistics(logits, targets)
    assert plain.error(largest + total.log() - own, exact.detach()) < 1e-6
    found = cross_entropy.cross_entropy_grad(logits, targets, largest, total.log(), scale)
    (grad,) = torch.autograd.grad(exact, wide, scale.double())
    assert plain.error(found, grad) < 2e-6


CHECKS: list[Callable[[int, str], None]] = [
    check_cast,
    check_column_sum,
    check_transpose,
    check_block_cast,
    check_layer_norm,
    check_rms_norm,
    check_gelu,
    check_swiglu,
]
ROW_BY_ROW: list[Callable[[int, str], None]] = [
    check_dropout,
    check_rope,
    check_join,
    check_embedding,
    check_cross_entropy,
]
"""Programs take a row or two each: the interpreter would take half a minute for 4097."""
CASES = [(check, rows) for check in CHECKS for rows in (5, 123, 4097)]
CASES += [(check, rows) for check in ROW_BY_ROW for rows in (5, 123, *[4097] * torch.cuda.is_available())]


@pytest.mark.parametrize(("check", "rows"), CASES)
@pytest.mark.filterwarnings("ignore:(divide by zero|overflow) encountered:RuntimeWarning")  # interpreter
def test_against_float64(check: Callable[[int, str], None], rows: int, device: str) -> None:
    check(rows, device)
