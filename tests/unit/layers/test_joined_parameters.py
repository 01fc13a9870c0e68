"""`parameters_split` inside FlatFSDP is bit-equal to one parameter, with fused gradients and in FP8."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatfsdp import FlatFSDP, Precision, microbatches
from flatfsdp.flat.layout import Role
from flatfsdp.fp8 import CurrentScaling, autocast
from flatfsdp.layers import LayerNormLinear, Linear, MultiheadAttention
from tests.support.fp8_layers import FFN, TOKENS, WIDTH

PARTS = {"q": 16, "k": 16, "v": 16}
HIDDEN, HEADS = 32, 2


def copied(whole: nn.Module, split: nn.Module) -> None:
    """Copies the single parameters of one layer into the several ones of another."""
    values = dict(whole.named_parameters())
    with torch.no_grad():
        for name, parameter in split.named_parameters():
            if name in values:
                parameter.copy_(values[name])
                continue
            path, _, attribute = name.rpartition(".")
            part, kind = attribute.split("_")
            row = list(PARTS).index(part) * 16
            parameter.copy_(values[f"{path}.{kind}".lstrip(".")][row : row + 16])


def train(model: FlatFSDP, precision: Precision) -> tuple[list[Tensor], dict[str, Tensor]]:
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    recipe = precision.fp8_weights
    for _ in range(3):
        for x in microbatches(model, torch.randn(2, TOKENS, WIDTH).to(precision.compute or torch.float32)):
            with autocast(enabled=recipe is not None, recipe=recipe):
                loss = model(x).float().square().mean()
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return losses, dict(model.state_dict())


@pytest.mark.parametrize("kind", [Linear, LayerNormLinear])
@pytest.mark.parametrize("fused", [False, True, "two_pass", "if_claimed"])
@pytest.mark.parametrize("flag", [True, False])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp8"])
def test_the_bits_of_one_parameter(kind: Any, fused: Any, flag: bool, precision: str) -> None:
    of = {
        "fp32": Precision(),
        "bf16": Precision(compute=torch.bfloat16),
        "fp8": Precision(compute=torch.bfloat16, fp8_weights=CurrentScaling()),
    }[precision]
    torch.manual_seed(0)
    whole = kind(WIDTH, FFN, fuse_wgrad_accumulation=fused)
    split = kind(WIDTH, FFN, fuse_wgrad_accumulation=fused, parameters_split=PARTS)
    copied(whole, split)
    models = [FlatFSDP(layer, precision=of, optimize_backward_concat=flag) for layer in (split, whole)]
    in_fp8 = {
        slot.name
        for group in models[0].fsdp_state.groups
        for slot in group.layout.slots
        if group.layout.role is Role.FP8
    }
    assert in_fp8 == ({f"{part}_weight" for part in PARTS} if precision == "fp8" else set())
    ours, theirs = (train(model, of) for model in models)
    assert all(map(torch.equal, ours[0], theirs[0]))
    for kind_of in ("weight", "bias"):
        joined = torch.cat([ours[1][f"{part}_{kind_of}"] for part in PARTS])
        assert torch.equal(joined, theirs[1][kind_of]), kind_of


def test_attention_without_a_pack_parameter_may_fuse_its_gradients() -> None:
    """By default query, key and value are separate parameters."""
    model = FlatFSDP(
        MultiheadAttention(HIDDEN, HEADS, attention_dropout=0.0, fuse_wgrad_accumulation=True),
        optimize_backward_concat=False,
    )
    model(torch.randn(4, 2, HIDDEN)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_parts_that_are_not_all_trained_are_no_pack() -> None:
    layer = Linear(WIDTH, FFN, parameters_split=PARTS, fuse_wgrad_accumulation=True)
    layer.k_weight.requires_grad_(False)
    model = FlatFSDP(layer, optimize_backward_concat=False)
    with pytest.raises(RuntimeError, match=r"one GEMM writes their gradients .* all have to be trained"):
        model(torch.randn(TOKENS, WIDTH))
    apart = Linear(WIDTH, FFN, parameters_split=PARTS, fuse_wgrad_accumulation="if_claimed")
    apart.k_weight.requires_grad_(False)
    x, plain = torch.randn(TOKENS, WIDTH), Linear(WIDTH, FFN)
    copied_back = torch.cat([getattr(apart, f"{part}_weight").detach() for part in PARTS])
    with torch.no_grad():
        plain.weight.copy_(copied_back)
    expected = plain(x)
    assert torch.equal(FlatFSDP(apart, optimize_backward_concat=False)(x), expected)
