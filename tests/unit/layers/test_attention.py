from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from flatfsdp.layers.attention import sdpa
from flatfsdp.layers.attention.dot_product import DotProductAttention
from flatfsdp.layers.attention.heads import HeadsOf, split_qkv
from flatfsdp.layers.attention.masks import WindowMasks
from tests.support import plain_layers as plain
from tests.support.assertions import saved_by

SEQ, BATCH, HEADS, DIM = 9, 3, 4, 8
TRIANGLE = plain.window(SEQ, SEQ, -1, 0)
BOUND = plain.EPS[torch.float32]


def against_plain(layer: DotProductAttention, seen: Tensor | None, **arguments: Any) -> None:
    def ours(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if layer.qkv_format == "bshd":
            return layer(query, key, value, **arguments)
        return layer(*(x.transpose(0, 1) for x in (query, key, value)), **arguments).transpose(0, 1)

    def expected(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return plain.attention(query, key, value, seen, layer.softmax_scale or DIM**-0.5)

    inputs = [plain.leaf(BATCH, SEQ, heads, DIM) for heads in (HEADS, *[layer.num_gqa_groups] * 2)]
    plain.same_gradients(ours, expected, inputs, BOUND)


def padding() -> Tensor:
    """A mask of the last keys of some sequences, [batch, 1, 1, keys]."""
    lengths = torch.tensor([SEQ, 4, 1])
    return (torch.arange(SEQ) >= lengths[:, None]).view(BATCH, 1, 1, SEQ)


@pytest.mark.parametrize("qkv_format", ["sbhd", "bshd"])
@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("mask_type", ["causal", "no_mask", "padding", "padding_causal", "arbitrary"])
def test_mask_types_against_float64(qkv_format: str, groups: int, mask_type: str) -> None:
    layer = DotProductAttention(HEADS, DIM, groups, qkv_format=qkv_format, attn_mask_type=mask_type)
    # Every query sees some key.
    arbitrary = (torch.rand(BATCH, 1, SEQ, SEQ) < 0.5) & ~torch.eye(SEQ, dtype=torch.bool)
    mask = {"padding": padding(), "padding_causal": padding(), "arbitrary": arbitrary}.get(mask_type)
    seen = {
        "causal": TRIANGLE,
        "no_mask": None,
        "padding": ~padding(),
        "padding_causal": ~padding() & TRIANGLE,
        "arbitrary": ~arbitrary,
    }[mask_type]
    against_plain(layer, seen, attention_mask=mask)


@pytest.mark.parametrize(
    ("mask_type", "given", "left", "right"),
    [
        ("causal", (3, 0), 3, 0),
        ("causal", (3, -1), 3, 0),
        ("causal", (1, 0), 1, 0),
        ("no_mask", (2, 1), 2, 1),
        ("no_mask", (-1, 2), -1, 2),
        ("padding_causal", (2, 0), 2, 0),
    ],
)
def test_windows_against_float64(mask_type: str, given: tuple[int, int], left: int, right: int) -> None:
    seen, arguments = plain.window(SEQ, SEQ, left, right), {}
    if mask_type == "padding_causal":
        # Some queries see no key at all.
        seen, arguments = seen & ~padding(), {"attention_mask": padding()}
    against_plain(
        DotProductAttention(HEADS, DIM, attn_mask_type=mask_type, window_size=given), seen, **arguments
    )
    of_call = DotProductAttention(HEADS, DIM, attn_mask_type="no_mask")
    against_plain(of_call, seen, attn_mask_type=mask_type, window_size=given, **arguments)


def test_softmax_scale() -> None:
    against_plain(DotProductAttention(HEADS, DIM, softmax_scale=0.7), TRIANGLE)


def test_a_query_that_sees_nothing_gives_zeros() -> None:
    layer = DotProductAttention(HEADS, DIM, attn_mask_type="arbitrary")
    mask = torch.zeros(1, 1, SEQ, SEQ, dtype=torch.bool)
    mask[:, :, 2] = True
    inputs = [plain.leaf(SEQ, BATCH, HEADS, DIM) for _ in range(3)]
    out = layer(*inputs, attention_mask=mask)
    assert torch.equal(out[2], torch.zeros(BATCH, HEADS * DIM)) and out[3].all()
    out.sum().backward()
    assert all(x.grad.isfinite().all() for x in inputs)


def test_more_keys_than_queries() -> None:
    layer = DotProductAttention(HEADS, DIM, attn_mask_type="no_mask")
    inputs = [plain.leaf(seq, BATCH, HEADS, DIM) for seq in (3, 5, 5)]
    plain.same_gradients(
        layer,
        lambda *qkv: plain.attention(*(x.transpose(0, 1) for x in qkv), None, DIM**-0.5).transpose(0, 1),
        inputs,
        BOUND,
    )
    with pytest.raises(ValueError, match="as many queries as keys, not 3 and 5"):
        layer(*inputs, window_size=(2, 2))


@pytest.mark.parametrize("qkv_format", ["sbhd", "bshd"])
def test_views_of_a_pack_projection_reach_torch_uncopied(qkv_format: str, monkeypatch: Any) -> None:
    mixed = torch.randn(SEQ, BATCH, 3 * HEADS * DIM)
    seen: list[Tensor] = []

    def spy(query: Tensor, key: Tensor, value: Tensor, **arguments: Any) -> Tensor:
        seen.extend((query, key, value))
        return F.scaled_dot_product_attention(query, key, value, **arguments)

    monkeypatch.setattr(sdpa, "F", SimpleNamespace(scaled_dot_product_attention=spy))
    DotProductAttention(HEADS, DIM, qkv_format=qkv_format)(
        *split_qkv(mixed, HeadsOf(HEADS, HEADS, DIM, True))
    )
    assert len(seen) == 3
    assert {x.untyped_storage().data_ptr() for x in seen} == {mixed.untyped_storage().data_ptr()}


def test_dropout_is_for_training_and_follows_the_seed() -> None:
    layer, plain_layer = DotProductAttention(HEADS, DIM, None, 0.5), DotProductAttention(HEADS, DIM)
    inputs = [torch.randn(SEQ, BATCH, HEADS, DIM) for _ in range(3)]

    def run() -> Tensor:
        torch.manual_seed(3)
        return layer(*inputs)

    assert torch.equal(run(), run())
    assert not torch.equal(layer(*inputs), run())
    layer.eval()
    assert torch.equal(layer(*inputs), plain_layer(*inputs))


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_checkpointed_attention_is_the_same_and_keeps_less(dropout: float) -> None:
    layer = DotProductAttention(HEADS, DIM, None, dropout)
    inputs = [plain.leaf(SEQ, BATCH, HEADS, DIM) for _ in range(3)]
    results = []
    for checkpoint in (False, True):
        torch.manual_seed(1)
        out, kept = saved_by(layer, *inputs, checkpoint_core_attention=checkpoint)
        storages = {tensor.untyped_storage().data_ptr() for tensor in kept}
        results.append((out, *torch.autograd.grad(out.square().sum(), inputs), len(storages)))
    (*without, more), (*with_checkpoint, fewer) = results
    assert all(torch.equal(a, b) for a, b in zip(without, with_checkpoint, strict=True))
    assert fewer < more


def test_bf16_and_autocast() -> None:
    layer = DotProductAttention(HEADS, DIM)
    inputs = [torch.randn(SEQ, BATCH, HEADS, DIM) for _ in range(3)]
    expected = layer(*inputs)
    assert plain.error(layer(*(x.bfloat16() for x in inputs)), expected) < plain.EPS[torch.bfloat16]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(*inputs).dtype == torch.bfloat16


def test_window_masks_are_made_once_and_not_kept_for_ever() -> None:
    masks, cpu = WindowMasks(capacity=2), torch.device("cpu")
    first = masks.get(4, 4, (1, 0), cpu)
    assert masks.get(4, 4, (1, 0), cpu) is first
    masks.get(5, 5, (1, 0), cpu)
    assert masks.get(4, 4, (1, 0), cpu) is first
    masks.get(6, 6, (1, 0), cpu)
    assert masks.get(4, 4, (1, 0), cpu) is first
    assert masks.get(5, 5, (1, 0), cpu).shape == (5, 5)
    assert masks.get(6, 6, (1, 0), cpu).shape == (6, 6)
    assert masks.get(4, 4, (1, 0), cpu) is not first


def test_masks_made_in_inference_serve_training() -> None:
    layer = DotProductAttention(HEADS, DIM, window_size=(2, 0))
    inputs = [plain.leaf(SEQ, BATCH, HEADS, DIM) for _ in range(3)]
    with torch.inference_mode():
        layer(*inputs)
    layer(*inputs).sum().backward()
    assert inputs[0].grad is not None


@pytest.mark.parametrize(
    ("mask_type", "mask", "message"),
    [
        ("causal", torch.zeros(1, 1, 1, SEQ, dtype=torch.bool), "takes no attention_mask"),
        ("padding", None, "needs an attention_mask"),
        ("padding", torch.zeros(BATCH, 1, 1, SEQ), "must be bool"),
        ("padding", torch.zeros(BATCH, SEQ, dtype=torch.bool), r"has shape \(3, 9\)"),
        ("padding", torch.zeros(BATCH, 1, SEQ, SEQ, dtype=torch.bool), r"needs \(3, 1, 1, 9\)"),
        ("arbitrary", torch.zeros(1, 1, SEQ, 2, dtype=torch.bool), r"needs \(3, 4, 9, 9\)"),
    ],
)
def test_masks_that_do_not_fit_are_named(mask_type: str, mask: Tensor | None, message: str) -> None:
    layer = DotProductAttention(HEADS, DIM, attn_mask_type=mask_type)
    qkv = torch.randn(SEQ, BATCH, HEADS, DIM)
    with pytest.raises(ValueError, match=message):
        layer(qkv, qkv, qkv, attention_mask=mask)


def test_tensors_that_do_not_fit_are_named() -> None:
    qkv = torch.randn(SEQ, BATCH, HEADS, DIM)
    with pytest.raises(ValueError, match=r"key has shape \(9, 3, 4, 8\).*\(2, 8\)"):
        DotProductAttention(HEADS, DIM, 2)(qkv, qkv, qkv)


CUDNN, FLASH = SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION
EFFICIENT, MATH = SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH


@pytest.mark.parametrize(
    ("capability", "has_mask", "off", "expected"),
    [
        ((9, 0), False, None, [CUDNN, FLASH, EFFICIENT, MATH]),
        ((9, 0), False, CUDNN, [FLASH, EFFICIENT, MATH]),
        ((9, 0), True, None, [EFFICIENT, MATH]),
        ((9, 0), True, EFFICIENT, [MATH]),
        ((8, 0), True, None, [EFFICIENT, MATH]),
        ((8, 0), False, None, [FLASH, EFFICIENT, MATH, CUDNN]),
    ],
)
def test_order_of_backends_on_gpus(
    capability: tuple[int, int], has_mask: bool, off: SDPBackend | None, expected: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    # A stand-in for a query on a GPU has no storage.
    query = SimpleNamespace(is_cuda=True, device=torch.device("cpu"))
    with sdpa_kernel([b for b in (FLASH, EFFICIENT, MATH, CUDNN) if b is not off], set_priority=True):
        before = _backends_in_order()
        with sdpa._backends(query, torch.ones(1) if has_mask else None):
            assert _backends_in_order() == expected
        assert _backends_in_order() == before


def _backends_in_order() -> list[SDPBackend]:
    """The enabled backends, in torch's order."""
    order = [SDPBackend(number) for number in torch._C._get_sdp_priority_order()]
    return [backend for backend in order if sdpa._IS_ON.get(backend, lambda: False)()]


@pytest.mark.parametrize("is_strict", [False, True])
def test_deterministic_attention_takes_the_ordered_backward(
    is_strict: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The forward is a stand-in for cuDNN's, which returns the logarithm of each query's sum, too."""

    def forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any, scale: float) -> tuple[Tensor, Tensor]:
        scores = (scale * q @ k.transpose(-1, -2)).masked_fill(~TRIANGLE, -torch.inf)
        return scores.softmax(-1) @ v, scores.logsumexp(-1)

    monkeypatch.setattr(sdpa, "is_ordered", lambda *parts, **named: True)
    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_cudnn_attention", forward)
    called = []
    backward = sdpa.attention_backward
    monkeypatch.setattr(
        sdpa, "attention_backward", lambda *args, **named: called.append(1) or backward(*args, **named)
    )
    inputs = [plain.leaf(BATCH, HEADS, SEQ, DIM) for _ in range(3)]
    torch.use_deterministic_algorithms(is_strict)
    try:
        ours = partial(sdpa.attention, mask=None, is_causal=True, dropout=0.0, scale=None)
        expected = partial(F.scaled_dot_product_attention, is_causal=True)
        plain.same_gradients(ours, expected, inputs, BOUND)
    finally:
        torch.use_deterministic_algorithms(False)
    assert bool(called) == is_strict
