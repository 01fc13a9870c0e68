"""A Llama against the same formulas in plain PyTorch; its stages against the whole; its sizes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from flatfsdp.fp8 import CurrentScaling
from flatfsdp.models import PRESETS, Llama, LlamaConfig, flops_per_token, stage_layers
from tests.support.assertions import assert_raises

CONFIG = LlamaConfig(3, 64, 96, heads=4, kv_heads=2, vocab=48, seq=32)


def samples(batch: int = 2, seq: int = 16) -> tuple[Tensor, Tensor]:
    return torch.randint(0, CONFIG.vocab, (batch, seq)), torch.randint(0, CONFIG.vocab, (batch, seq))


def rotated(x_bnsd: Tensor) -> Tensor:
    seq, dim = x_bnsd.shape[-2:]
    angles = torch.outer(torch.arange(seq), CONFIG.rope_theta ** -(torch.arange(0, dim, 2) / dim)).double()
    a, b = x_bnsd.chunk(2, -1)
    return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)


def plain_loss(weights: dict[str, Tensor], tokens: Tensor, targets: Tensor) -> Tensor:
    """The loss in plain PyTorch, batch first."""
    heads, groups, dim = CONFIG.heads, CONFIG.kv_heads, CONFIG.head_dim

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, CONFIG.norm_eps)

    x = weights["embedding.weight"][tokens]
    for number in range(CONFIG.layers):
        w = {
            name.removeprefix(f"layers.{number}."): weight
            for name, weight in weights.items()
            if name.startswith(f"layers.{number}.")
        }
        h = norm(x, w["self_attention.layernorm_qkv.layer_norm_weight"])
        # Each group of heads: its queries, its key, its value.
        qkv = (h @ w["self_attention.layernorm_qkv.weight"].t()).unflatten(-1, (groups, -1, dim))
        q, k, v = qkv.split((heads // groups, 1, 1), dim=3)
        q, k, v = (z.flatten(2, 3).transpose(1, 2) for z in (q, k, v))
        y = F.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True, enable_gqa=True)
        x = x + y.transpose(1, 2).flatten(2) @ w["self_attention.proj.weight"].t()
        h = norm(x, w["layernorm_mlp.layer_norm_weight"])
        gate, up = (h @ w["layernorm_mlp.fc1_weight"].t()).chunk(2, -1)
        x = x + (F.silu(gate) * up) @ w["layernorm_mlp.fc2_weight"].t()
    logits = norm(x, weights["norm.weight"]) @ weights["head.weight"].t()
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def test_loss_and_gradients_are_those_of_plain_pytorch() -> None:
    model = Llama(CONFIG)
    tokens, targets = samples()
    plain = {name: p.detach().double().requires_grad_() for name, p in model.named_parameters()}
    expected = plain_loss(plain, tokens, targets)
    expected.backward()
    loss = model(tokens, targets)
    loss.backward()
    assert abs(loss - expected) < 1e-6 * expected
    assert torch.equal(model.loss(model(tokens), targets), loss)
    for name, parameter in model.named_parameters():
        error = (parameter.grad - plain[name].grad).norm() / plain[name].grad.norm()
        assert error < 1e-5, name


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_stages_have_the_whole_models_names_and_values(stages: int) -> None:
    whole = dict(Llama(CONFIG, seed=5).named_parameters())
    torch.manual_seed(stages)
    parts = [Llama(CONFIG, layers, seed=5) for layers in stage_layers(CONFIG.layers, stages)]
    named = [pair for part in parts for pair in part.named_parameters()]
    assert [name for name, _ in named] == list(whole)
    assert all(torch.equal(value, whole[name]) for name, value in named)
    tokens, targets = samples()
    x: Any = tokens
    for part in parts[:-1]:
        x = part(x)
        assert x.shape == (16, 2, CONFIG.hidden)
    assert torch.equal(parts[-1](x, targets), Llama(CONFIG, seed=5)(tokens, targets))


def test_initial_values() -> None:
    model, other = Llama(CONFIG, seed=1), Llama(CONFIG, seed=2)
    by_name = dict(model.named_parameters())
    seen: list[Tensor] = []
    for name, weight in by_name.items():
        if "norm" in name.rpartition(".")[2] or name == "norm.weight":
            assert (weight == 1).all()
            continue
        assert not torch.equal(weight, other.get_parameter(name))
        assert not any(torch.equal(weight[:32, :32], earlier) for earlier in seen), name
        seen.append(weight[:32, :32])
        adds = name.endswith(("proj.weight", "fc2_weight"))
        std = 1.0 if name == "embedding.weight" else (64 * (6 if adds else 1)) ** -0.5
        assert abs(weight.std() / std - 1) < 0.05, name


def test_built_on_meta_it_gets_the_same_values() -> None:
    whole = Llama(CONFIG, seed=5)
    late = Llama(CONFIG, seed=5, device="meta")
    assert all(p.is_meta for p in late.parameters())
    late.to_empty(device="cpu")
    # In any order.
    for owner in reversed(list(late.modules())):
        if list(owner.parameters(recurse=False)):
            late.initialize(owner)
    assert all(map(torch.equal, whole.parameters(), late.parameters()))


def test_fp8_is_on_in_the_layers_alone() -> None:
    tokens, targets = samples()
    plain, fp8 = Llama(CONFIG), Llama(CONFIG, recipe=CurrentScaling())
    with torch.autocast("cpu", torch.bfloat16):
        losses = [model(tokens, targets) for model in (plain, fp8)]
    assert not torch.equal(*losses) and abs(losses[0] - losses[1]) < 0.05
    x = torch.randn(16, 2, 64)
    stages = [Llama(CONFIG, range(3, 3), recipe=recipe) for recipe in (None, CurrentScaling())]
    assert torch.equal(stages[0](x), stages[1](x))


@pytest.mark.parametrize(("layers", "stages"), [(8, 4), (5, 2), (7, 4), (80, 16), (3, 3)])
def test_layers_are_split_evenly_and_the_last_stage_has_not_more(layers: int, stages: int) -> None:
    split = stage_layers(layers, stages)
    assert [number for part in split for number in part] == list(range(layers))
    sizes = [len(part) for part in split]
    assert len(sizes) == stages and max(sizes) - min(sizes) <= 1 and sizes[-1] == min(sizes)


@pytest.mark.parametrize("stages", [1, 2, 4, 8])
def test_the_last_stage_has_fewer_layers_as_it_has_the_head(stages: int) -> None:
    config = replace(PRESETS["1b"], seq=4096)
    assert config.head_layers == pytest.approx(3.8, abs=0.01)
    sizes = [len(part) for part in stage_layers(config.layers, stages, config.head_layers)]
    assert sum(sizes) == config.layers
    assert sizes == {1: [16], 2: [10, 6], 4: [5, 5, 5, 1], 8: [3, 2, 2, 2, 2, 2, 2, 1]}[stages]


@pytest.mark.parametrize("stages", [0, 4])
def test_each_stage_needs_a_layer(stages: int) -> None:
    assert_raises(ValueError, f"3 layers cannot be split into {stages} stages", stage_layers, 3, stages)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"layers": 0}, "layers is 0; it must be positive"),
        ({"norm_eps": -1e-5}, "norm_eps is -1e-05"),
        ({"hidden": 36}, "hidden is 36; it must be an even multiple of heads, 4"),
        ({"kv_heads": 3}, "heads is 4; it must be a multiple of kv_heads, 3"),
    ],
)
def test_sizes_that_do_not_fit(sizes: dict[str, Any], message: str) -> None:
    assert_raises(ValueError, message, replace, CONFIG, **sizes)


def test_layers_and_sequences_that_are_none_of_the_model() -> None:
    for layers in (range(2, 4), range(2, 1), range(0, 3, 2)):
        assert_raises(ValueError, "the model has layers 0 to 2", Llama, CONFIG, layers)
    with pytest.raises(ValueError, match="33 tokens is longer than 32"):
        Llama(CONFIG)(torch.zeros(1, 33, dtype=torch.int64))


def test_flops_count_the_weights_of_products() -> None:
    with torch.device("meta"):
        model = Llama(PRESETS["tiny"])
    counted = sum(
        p.numel() for name, p in model.named_parameters() if p.dim() == 2 and "embedding" not in name
    )
    assert flops_per_token(PRESETS["tiny"]) == 6 * counted + 6 * 4 * 64 * 64
    assert flops_per_token(PRESETS["tiny"], 16) == 6 * counted + 6 * 4 * 64 * 16


@pytest.mark.parametrize(("name", "billions"), [("1b", 1.5), ("8b", 8.03), ("70b", 70.6)])
def test_presets_have_the_sizes_of_their_names(name: str, billions: float) -> None:
    model = Llama(PRESETS[name], device="meta")
    assert abs(sum(p.numel() for p in model.parameters()) / 1e9 - billions) < 0.05
