"""Rotary position embedding against complex multiplication in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flatfsdp.kernels.attention import rope
from tests.support.kernels.compiling import compile_for_hopper
from tests.support.kernels.running import both, check_operator, garbage

BOTH = both(rope.reference, rope.launch)
LAYOUTS = pytest.mark.parametrize("batch_first", [False, True], ids=["sbhd", "bshd"])
PAIRS = pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
SEQ, BATCH, HEADS = 7, 2, 3


def tables(pairs: int, device: str) -> tuple[Tensor, Tensor]:
    """Cosine and sine for more positions than are used."""
    inverse_frequency = 10000 ** -(torch.arange(pairs, device=device, dtype=torch.float64) / pairs)
    angle = torch.arange(SEQ + 2, device=device)[:, None] * inverse_frequency
    return angle.cos().float(), angle.sin().float()


def random(dim: int, batch_first: bool, device: str, dtype: torch.dtype = torch.float32) -> Tensor:
    shape = (BATCH, SEQ, HEADS, dim) if batch_first else (SEQ, BATCH, HEADS, dim)
    return torch.randn(shape, device=device).to(dtype)


def turn(run: Any, x: Tensor, cos: Tensor, sin: Tensor, **options: bool) -> Tensor:
    """Turns into garbage memory."""
    out = garbage(*x.shape, like=x, dtype=x.dtype)
    run(out, x, cos, sin, *(options.get(name, False) for name in ("batch_first", "interleaved", "inverse")))
    return out


def exact(x: Tensor, cos: Tensor, sin: Tensor, batch_first: bool, interleaved: bool) -> Tensor:
    pairs = cos.shape[1]
    value = x.double()
    rotated = value[..., : 2 * pairs]
    rotated = rotated.unflatten(-1, (pairs, 2) if interleaved else (2, pairs))
    rotated = rotated if interleaved else rotated.transpose(-1, -2)
    angle = torch.complex(cos.double(), sin.double())[:SEQ]
    angle = angle[None, :, None] if batch_first else angle[:, None, None]
    turned = torch.view_as_real(torch.view_as_complex(rotated.contiguous()) * angle)
    turned = (turned if interleaved else turned.transpose(-1, -2)).flatten(-2)
    return torch.cat([turned, value[..., 2 * pairs :]], -1)


@BOTH
@LAYOUTS
@PAIRS
@pytest.mark.parametrize(("dim", "pairs"), [(32, 16), (24, 12), (40, 8)])
def test_forward_against_float64(
    run: Any, batch_first: bool, interleaved: bool, dim: int, pairs: int, device: str
) -> None:
    x, (cos, sin) = random(dim, batch_first, device), tables(pairs, device)
    ours = turn(run, x, cos, sin, batch_first=batch_first, interleaved=interleaved)
    expected = exact(x, cos, sin, batch_first, interleaved)
    assert (ours - expected).abs().max() < 1e-6
    assert torch.equal(ours[..., 2 * pairs :], x[..., 2 * pairs :])


@BOTH
@PAIRS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once(run: Any, interleaved: bool, dtype: torch.dtype, device: str) -> None:
    x, (cos, sin) = random(32, False, device, dtype), tables(16, device)
    ours = turn(run, x, cos, sin, interleaved=interleaved)
    assert torch.equal(ours, turn(run, x.float(), cos, sin, interleaved=interleaved).to(dtype))


@BOTH
@LAYOUTS
@PAIRS
def test_the_inverse_is_the_gradient(run: Any, batch_first: bool, interleaved: bool, device: str) -> None:
    options = {"batch_first": batch_first, "interleaved": interleaved}
    x, dy = (random(40, batch_first, device) for _ in range(2))
    cos, sin = tables(16, device)
    wide = x.double().requires_grad_()
    exact(wide, cos, sin, **options).backward(dy.double())
    assert wide.grad is not None
    assert (turn(run, dy, cos, sin, inverse=True, **options) - wide.grad).abs().max() < 1e-6
    back = turn(run, turn(run, x, cos, sin, **options), cos, sin, inverse=True, **options)
    assert (back - x).abs().max() < 1e-6


@BOTH
@LAYOUTS
@PAIRS
def test_in_place_and_strided_give_the_same_bits(
    run: Any, batch_first: bool, interleaved: bool, device: str
) -> None:
    cos, sin = tables(16, device)
    pack = random(3 * 40, batch_first, device, torch.bfloat16)
    before, q = pack.clone(), pack[..., 40:80]
    expected = turn(run, q.contiguous(), cos, sin, batch_first=batch_first, interleaved=interleaved)
    assert torch.equal(turn(run, q, cos, sin, batch_first=batch_first, interleaved=interleaved), expected)
    run(q, None, cos, sin, batch_first, interleaved, False)
    assert torch.equal(q, expected)
    assert torch.equal(pack[..., :40], before[..., :40]) and torch.equal(pack[..., 80:], before[..., 80:])


def test_more_heads_than_a_tile_holds(device: str) -> None:
    x = torch.randn(2, 1, 70, 64, device=device)
    cos, sin = tables(32, device)
    assert rope.tile(x.dtype, 70, 32).rows < 70
    ours, expected = (turn(run, x, cos, sin) for run in (rope.launch, rope.reference))
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-6)


def test_public_function_in_place_or_not(device: str) -> None:
    x, (cos, sin) = random(32, False, device), tables(16, device)
    kept = x.clone()
    out = rope.rope(x, cos, sin)
    assert torch.equal(x, kept)
    assert rope.rope(x, cos, sin, in_place=True) is x
    assert torch.equal(x, out)


@BOTH
@PAIRS
def test_no_tokens_give_no_tokens(run: Any, interleaved: bool, device: str) -> None:
    cos, sin = tables(16, device)
    for shape in ((0, 2, 3, 40), (5, 0, 3, 40)):
        x = torch.empty(shape, device=device)
        assert turn(run, x, cos, sin, interleaved=interleaved).shape == shape
        assert rope.rope(x, cos, sin, interleaved=interleaved).shape == shape


def test_what_does_not_fit_is_named() -> None:
    x, (cos, sin) = random(32, False, "cpu"), tables(16, "cpu")
    for message, arguments in (
        (r"x is torch\.float64", (x.double(), cos, sin)),
        (r"x is .* strides .* the last of stride 1", (x.transpose(2, 3), cos, sin)),
        (r"cos has shape \(6, 16\); x needs at least 7 rows", (x, cos[:6], sin[:6])),
        (r"cos has shape \(9, 16\); .* 1 to 15 columns", (x[..., :30], cos, sin)),
        (r"sin is torch\.float32 \(8, 16\)", (x, cos, sin[:8])),
    ):
        with pytest.raises(ValueError, match=message):
            rope.rope(*arguments)


def test_compiled_and_faked_calls_go_through_the_operator() -> None:
    x, (cos, sin) = random(32, False, "cpu"), tables(16, "cpu")
    for source in (x.clone(), None):
        check_operator("rope_", x, source, cos, sin, False, True, False)


@PAIRS
def test_it_compiles_for_hopper_with_wide_accesses(interleaved: bool) -> None:
    tile = rope.tile(torch.bfloat16, 32, 64)
    strides = [f"{tensor}_{dim}_stride" for tensor in ("x", "out") for dim in ("seq", "batch", "head")]
    types = {"x_ptr out_ptr": "*bf16", "cos_ptr sin_ptr": "*fp32", " ".join(["batch heads", *strides]): "i32"}
    constants = {"PAIRS": 64, "TAIL": 0, "BLOCK_TAIL": 1, "INTERLEAVED": interleaved, "INVERSE": False}
    constants |= {"BLOCK_HEADS": tile.rows, "BLOCK_PAIRS": tile.cols}
    compiled = compile_for_hopper("attention.rope._rope_kernel", types, constants, tile=tile, aligned=strides)
    assert "ld.global.v4.b32" in compiled.ptx and "st.global.v4.b32" in compiled.ptx
    assert "st.global.b16" not in compiled.ptx
