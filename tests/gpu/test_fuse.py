"""Fused Hugging Face models on a GPU: bit-equal to our layers, one GEMM per pack, and no copies."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from flatfsdp import Precision, shard
from flatfsdp.compat.transformers import fuse
from flatfsdp.fp8 import CurrentScaling, DelayedScaling, Recipe, autocast
from flatfsdp.layers import TransformerLayer
from flatfsdp.layers.attention.rotary import RotaryTables
from tests.support.ecosystem.families import FAMILIES, Family, needs_transformers
from tests.support.ranks import on_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0),
        reason="needs a Hopper GPU",
    ),
    needs_transformers,
]
SEEDS = range(5)
FUSED = ["Llama", "Mistral", "Qwen2", "Qwen3", "GPT-2", "Mixtral"]
LAYERS, HIDDEN, FFN, HEADS, GROUPS, HEAD_DIM, SEQ = 4, 512, 1024, 8, 4, 64, 256
_WIDE = {
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
    "vocab_size": 1024,
    "max_position_embeddings": SEQ,
}
_GPT2 = {"n_embd": HIDDEN, "n_layer": LAYERS, "n_head": HEADS, "vocab_size": 1024, "n_positions": SEQ}


def wide(name: str) -> Any:
    family: Family = FAMILIES[name]
    sizes = {**family.sizes, **(_GPT2 if name == "GPT-2" else _WIDE)}
    sizes.pop("head_dim", None)
    return family._replace(sizes=sizes).build().cuda()


def tokens(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, 1024, (2, SEQ), generator=generator).cuda()


def loss_and_grads(model: Any, seed: int) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad(set_to_none=True)
    ids = tokens(seed)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def distance(ours: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The relative distance of all gradients together."""
    assert ours.keys() == expected.keys()
    found, exact = (
        torch.cat([each[name].double().flatten() for name in expected]) for each in (ours, expected)
    )
    return ((found - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("name", FUSED)
def test_families_compute_what_transformers_computes(name: str) -> None:
    """In FP32 equal within rounding; in bf16 no further from FP32 than transformers is."""
    if name not in FAMILIES:
        pytest.skip(f"no {name} here")
    plain = wide(name)
    fused = fuse(copy.deepcopy(plain))
    exact = [loss_and_grads(plain, seed) for seed in SEEDS]
    loss, grads = loss_and_grads(fused, SEEDS[0])
    torch.testing.assert_close(loss, exact[0][0], rtol=1e-5, atol=0)
    assert distance(grads, exact[0][1]) < 1e-5
    theirs, ours = (
        statistics.mean(
            distance(loss_and_grads(narrow, seed)[1], of_seed)
            for seed, (_, of_seed) in zip(SEEDS, exact, strict=True)
        )
        for narrow in (plain.bfloat16(), fused.bfloat16())
    )
    # If two experts are nearly as good, rounding decides.
    assert ours <= (1.5 if name == "Mixtral" else 1.1) * theirs, (ours, theirs)


def own_layer(layer: Any) -> TransformerLayer:
    """Our layer with the values of a LlamaDecoderLayer."""
    own = TransformerLayer(
        HIDDEN,
        FFN,
        HEADS,
        GROUPS,
        layer.input_layernorm.variance_epsilon,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias=False,
        normalization="RMSNorm",
        activation="swiglu",
        attn_input_format="bshd",
        fuse_qkv_params=True,
        qkv_weight_interleaved=False,
        params_dtype=torch.bfloat16,
        device="cuda",
    )
    attention, mlp = layer.self_attn, layer.mlp
    values = {
        "self_attention.layernorm_qkv.weight": [attention.q_proj, attention.k_proj, attention.v_proj],
        "self_attention.layernorm_qkv.layer_norm_weight": [layer.input_layernorm],
        "self_attention.proj.weight": [attention.o_proj],
        "layernorm_mlp.layer_norm_weight": [layer.post_attention_layernorm],
        "layernorm_mlp.fc1_weight": [mlp.gate_proj, mlp.up_proj],
        "layernorm_mlp.fc2_weight": [mlp.down_proj],
    }
    with torch.no_grad():
        for name, modules in values.items():
            own.get_parameter(name).copy_(torch.cat([module.weight for module in modules]))
    return own


@pytest.mark.parametrize(
    "recipe", [None, CurrentScaling(), DelayedScaling()], ids=["bf16", "current", "delayed"]
)
def test_a_fused_layer_has_the_bits_of_ours(recipe: Recipe | None) -> None:
    model = fuse(wide("Llama").bfloat16())
    layer = model.model.layers[0]
    own = own_layer(layer)
    positions = torch.arange(SEQ, device="cuda")[None]
    # transformers computes angles in another order of operations.
    angles = (
        each[0, :, : HEAD_DIM // 2]
        for each in model.model.rotary_emb(torch.ones(1, device="cuda"), positions)
    )
    rope = RotaryTables(*(each.contiguous() for each in angles), interleaved=False)
    for step in range(3):
        torch.manual_seed(step)
        x = torch.randn(2, SEQ, HIDDEN, device="cuda", dtype=torch.bfloat16)
        grad = torch.randn_like(x)
        found = []
        for compute, inputs in (
            (lambda x: layer(x, position_embeddings=model.model.rotary_emb(x, positions)), x.clone()),
            (lambda x: own(x, rotary_pos_emb=rope), x.clone()),
        ):
            inputs.requires_grad_()
            with autocast(enabled=recipe is not None, recipe=recipe):
                out = compute(inputs)
            out.backward(grad)
            found.append((out.detach(), inputs.grad))
        (ours, d_ours), (theirs, d_theirs) = found
        assert torch.isfinite(ours).all()
        assert torch.equal(ours, theirs)
        assert torch.equal(d_ours, d_theirs)
    attention, mlp = layer.self_attn, layer.mlp
    for parts, name in (
        ((attention.q_proj, attention.k_proj, attention.v_proj), "self_attention.layernorm_qkv.weight"),
        ((mlp.gate_proj, mlp.up_proj), "layernorm_mlp.fc1_weight"),
    ):
        pack = torch.cat([part.weight.grad for part in parts])
        assert torch.equal(pack, own.get_parameter(name).grad)


def kernels_of(run: Callable[[], Any]) -> list[str]:
    """Names of the kernels and copies that run on the GPU, in order."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    return [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]


GEMMS = ("gemm", "nvjet", "cutlass", "matmul")


def products_of(names: list[str]) -> list[str]:
    """The GEMMs among these names, except those of FP32, by which transformers computes its angles."""
    return [n for n in names if any(part in n.lower() for part in GEMMS) and "sgemm" not in n]


@pytest.mark.parametrize("flag", [True, False], ids=["on", "off"])
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@on_ranks(1, backend="nccl")
def test_a_pack_is_one_gemm_without_a_copy(rank: int, fp8: bool, flag: bool) -> None:
    """A layer's forward runs four GEMMs: q k v, out, gate and up, down; nothing is concatenated."""
    precision = Precision(compute=torch.bfloat16, fp8_weights=CurrentScaling() if fp8 else None)
    model = shard(
        fuse(wide("Llama"), fp8=fp8),
        FAMILIES["Llama"].is_unit,
        precision=precision,
        device="cuda",
        optimize_backward_concat=flag,
    )
    assert not any("pack" in row.buffer for row in model.memory_report().rows)
    ids = tokens(1)

    def step() -> None:
        with autocast(enabled=fp8, recipe=DelayedScaling()):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        model.zero_grad()

    step()

    def forward() -> None:
        with torch.no_grad(), autocast(enabled=fp8, recipe=DelayedScaling()):
            model.model(input_ids=ids, use_cache=False)

    forward()
    names = kernels_of(forward)
    # A few per forward, such as transformers' angles, and none per layer.
    assert len([name for name in names if "CatArray" in name]) < LAYERS, names
    products = products_of(names)
    assert len(products) == 4 * LAYERS, products
    step_names = kernels_of(step)
    if flag:
        # With the flag off autograd concatenates all gradients of a unit.
        assert len([name for name in step_names if "CatArray" in name]) < LAYERS, step_names
    # Weight gradients of one pack are one GEMM, too: three per linear map, and three of the head.
    products = products_of(step_names)
    assert len(products) <= 3 * 4 * LAYERS + 3, products
