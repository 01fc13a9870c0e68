from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatfsdp.layers.attention.multihead import MultiheadAttention
from flatfsdp.layers.attention.rotary import RotaryPositionEmbedding
from tests.support import plain_layers as plain
from tests.support.assertions import saved_by
from tests.support.plain_attention import check_sequences, expected_output, trained

SEQ, BATCH, HIDDEN, HEADS = 7, 2, 32, 4
BOUND = 5e-6


def against_plain(layer: MultiheadAttention, seen: Tensor | None, expected: Any, **arguments: Any) -> None:
    check_sequences(
        layer,
        layer.core_attention.qkv_format,
        lambda x, state: expected(layer, x, state, seen),
        (BATCH, SEQ, HIDDEN),
        BOUND,
        **arguments,
    )


def attention(**options: Any) -> MultiheadAttention:
    return MultiheadAttention(HIDDEN, HEADS, **{"attention_dropout": 0.0, **options})


TRIANGLE = plain.window(SEQ, SEQ, -1, 0)
LAYOUTS = {
    "interleaved": {"fuse_qkv_params": True},
    "fused": {"fuse_qkv_params": True, "qkv_weight_interleaved": False},
    "split": {"fuse_qkv_params": False},
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("qkv_format", ["sbhd", "bshd"])
def test_layouts_against_float64(layout: dict[str, bool], groups: int, qkv_format: str) -> None:
    layer = attention(num_gqa_groups=groups, input_layernorm=groups == 2, qkv_format=qkv_format, **layout)
    against_plain(trained(layer), TRIANGLE, expected_output)


@pytest.mark.parametrize("qk_norm", [None, "L2Normalization", "RMSNorm", "LayerNorm"])
@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_and_norms_against_float64(qk_norm: str | None, before: bool, interleaved: bool) -> None:
    layer = attention(
        num_gqa_groups=2,
        fuse_qkv_params=True,
        qk_norm_type=qk_norm,
        qk_norm_before_rope=before,
        rotary_pos_interleaved=interleaved,
        rotary_base=100.0,
        normalization="RMSNorm",
        input_layernorm=True,
        attn_mask_type="no_mask",
    )

    def expected(*arguments: Any) -> Tensor:
        return expected_output(*arguments, qk_norm=qk_norm, base=100.0)

    against_plain(trained(layer), None, expected)


def test_tables_may_come_from_outside() -> None:
    own = trained(attention(rotary_base=500.0, qkv_format="bshd"))
    other = attention(qkv_format="bshd")
    other.load_state_dict(own.state_dict())
    x, tables = torch.randn(BATCH, SEQ, HIDDEN), RotaryPositionEmbedding(8, rotary_base=500.0)(SEQ)
    assert torch.equal(own(x), other(x, rotary_pos_emb=tables))
    assert torch.equal(own(x), other(x, rotary_pos_emb=(tables.cos, tables.sin)))
    assert not torch.allclose(own(x), other(x))
    neighbours = RotaryPositionEmbedding(HIDDEN // HEADS, interleaved=True)(SEQ)
    with pytest.raises(ValueError, match="rotary_pos_emb is interleaved=True"):
        other(x, rotary_pos_emb=neighbours)
    with pytest.raises(TypeError, match=r"rotary_pos_emb is one tensor.*\(cos, sin\)"):
        other(x, rotary_pos_emb=torch.randn(SEQ, 1, 1, HIDDEN // HEADS))
    with pytest.raises(ValueError, match=r"has shape \(5, 32\).*\[seq, batch, hidden_size\].*'bshd'"):
        other(torch.randn(5, 32))


@pytest.mark.parametrize("mask_type", ["causal", "no_mask"])
def test_it_equals_torchs(mask_type: str) -> None:
    theirs = nn.MultiheadAttention(HIDDEN, HEADS, dtype=torch.float64)
    ours = attention(attn_mask_type=mask_type, fuse_qkv_params=True, qkv_weight_interleaved=False)
    ours.load_state_dict(
        {
            "qkv.weight": theirs.in_proj_weight,
            "qkv.bias": theirs.in_proj_bias,
            "proj.weight": theirs.out_proj.weight,
            "proj.bias": theirs.out_proj.bias,
        }
    )
    x = torch.randn(SEQ, BATCH, HIDDEN)
    mask = ~TRIANGLE if mask_type == "causal" else None
    expected, _ = theirs(x.double(), x.double(), x.double(), attn_mask=mask, need_weights=False)
    assert plain.error(ours(x), expected) < 1e-6


def test_what_is_returned() -> None:
    x = torch.randn(SEQ, BATCH, HIDDEN)
    layer = trained(attention(return_bias=True, return_layernorm_output=True, input_layernorm=True))
    out, bias, normed, residual = layer(x, return_residual=True)
    assert len(layer(x)) == 3
    assert torch.equal(bias, layer.proj.bias) and torch.equal(residual, x)
    norm = layer.layernorm_qkv
    assert plain.error(normed, plain.norm(x, norm.layer_norm_weight, norm.layer_norm_bias)) < 1e-6
    layer.proj.return_bias = layer.return_bias = False
    layer.return_layernorm_output = layer.layernorm_qkv.return_layernorm_output = False
    assert torch.allclose(layer(x), out + bias, atol=1e-6)
    assert attention()(x, return_residual=True)[1] is x


def test_names_are_transformer_engines() -> None:
    """`TransformerLayer` has those of one parameter."""
    split = attention(num_gqa_groups=2, qk_norm_type="RMSNorm", bias=False)
    assert {name: tuple(tensor.shape) for name, tensor in split.state_dict().items()} == {
        "qkv.query_weight": (HIDDEN, HIDDEN),
        "qkv.key_weight": (HIDDEN // 2, HIDDEN),
        "qkv.value_weight": (HIDDEN // 2, HIDDEN),
        "q_norm.weight": (HIDDEN // HEADS,),
        "k_norm.weight": (HIDDEN // HEADS,),
        "proj.weight": (HIDDEN, HIDDEN),
    }


@pytest.mark.parametrize("interleaved", [False, True])
def test_with_rope_nothing_saved_keeps_the_pack_projection(interleaved: bool) -> None:
    """Its queries and keys would be kept twice, before and after the rotation."""
    layer = attention(
        num_gqa_groups=2, fuse_qkv_params=True, rotary_base=1e4, qkv_weight_interleaved=interleaved
    )
    _, kept = saved_by(layer, plain.leaf(6, 2, HIDDEN))
    pack = 4 * 6 * 2 * (2 * HIDDEN)
    assert pack not in [tensor.untyped_storage().nbytes() for tensor in kept]
