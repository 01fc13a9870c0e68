from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor

from flatfsdp.layers.attention.rotary import RotaryPositionEmbedding, apply_rotary
from tests.support import plain_layers as plain


def test_tables_are_exact_at_far_positions() -> None:
    tables = RotaryPositionEmbedding(8, rotary_base=500000.0)(100_001)
    for pair in range(4):
        angle = 100_000 * 500000.0 ** (-2 * pair / 8)
        assert tables.cos[-1, pair].item() == pytest.approx(math.cos(angle), abs=1e-7)
        assert tables.sin[-1, pair].item() == pytest.approx(math.sin(angle), abs=1e-7)


def test_tables_grow_and_are_kept() -> None:
    rotary = RotaryPositionEmbedding(8)
    short = rotary(5)
    assert short.cos.shape == (5, 4)
    assert rotary(8).cos.data_ptr() == short.cos.data_ptr()
    long = rotary(9)
    assert long.cos.shape == (9, 4) and torch.equal(long.sin[:5], short.sin)
    assert rotary(3).cos.data_ptr() == long.cos.data_ptr()


def test_tables_stay_fp32_and_out_of_checkpoints() -> None:
    rotary = RotaryPositionEmbedding(8)
    before = rotary(4)
    rotary.bfloat16()
    assert rotary(4).cos.dtype == torch.float32 and torch.equal(rotary(4).cos, before.cos)
    assert not rotary.state_dict() and not [*rotary.buffers()]
    assert torch.equal(copy.deepcopy(rotary)(4).cos, before.cos)


def test_tables_made_in_inference_serve_training() -> None:
    rotary = RotaryPositionEmbedding(8)
    with torch.inference_mode():
        rotary(4)
    x = plain.leaf(4, 1, 2, 8)
    apply_rotary(x, *rotary(4)[:2]).sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
def test_turning_against_float64(batch_first: bool, interleaved: bool) -> None:
    rotary = RotaryPositionEmbedding(12, interleaved=interleaved)
    tables = rotary(7)
    assert tables.interleaved is interleaved

    def ours(x: Tensor) -> Tensor:
        x = x if batch_first else x.transpose(0, 1)
        out = apply_rotary(x, tables.cos, tables.sin, batch_first=batch_first, interleaved=interleaved)
        return out if batch_first else out.transpose(0, 1)

    def expected(x: Tensor) -> Tensor:
        return plain.rotated(x, interleaved=interleaved)

    plain.same_gradients(ours, expected, [plain.leaf(3, 7, 2, 12)], 1e-6)


def test_slices_of_a_pack_projection_are_read_in_place() -> None:
    tables = RotaryPositionEmbedding(8)(5)
    mixed = plain.leaf(5, 2, 6, 8)
    part = mixed[:, :, 1:3]
    out = apply_rotary(part, tables.cos, tables.sin)
    assert torch.equal(out, apply_rotary(part.contiguous(), tables.cos, tables.sin))
    # A gradient whose last stride is not 1.
    dy = torch.randn(8, 5, 2, 2).permute(1, 2, 3, 0)
    (grad,) = torch.autograd.grad(out, part, dy, retain_graph=True)
    (dense,) = torch.autograd.grad(out, part, dy.contiguous())
    assert torch.equal(grad, dense)


def test_what_does_not_fit_is_named() -> None:
    with pytest.raises(ValueError, match="dim is 7"):
        RotaryPositionEmbedding(7)
    tables = RotaryPositionEmbedding(8)(4)
    with pytest.raises(ValueError, match="at least 5 rows"):
        apply_rotary(torch.randn(5, 1, 1, 8), tables.cos, tables.sin)
