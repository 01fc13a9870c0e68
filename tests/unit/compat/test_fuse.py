"""`fuse`: our kernels compute models of transformers with equal results; the models stay the same."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from flatfsdp import FlatFSDP, fp8
from flatfsdp.compat.transformers import fuse, unfuse
from flatfsdp.compat.transformers.fused.fused_part import is_fused
from flatfsdp.compat.transformers.fused.small import tables_of
from flatfsdp.compat.transformers.fused.why_not import no_linear
from flatfsdp.layers import Linear, TransformerLayer, convert
from tests.support.assertions import assert_raises
from tests.support.copies import by_pickle
from tests.support.ecosystem.families import VOCAB, adapted, generated, needs_peft, needs_transformers
from tests.support.ecosystem.fused import FUSED, assert_near, batch, build, loss_and_grads

pytestmark = needs_transformers

PADDED = torch.ones(2, 9, dtype=torch.int64)
PADDED[1, 6:] = 0


@pytest.fixture
def silence(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Checks that nothing is left to transformers."""
    with caplog.at_level(logging.WARNING):
        yield
    assert said(caplog) == []


def check_fused(plain: Any, fused: Any = None, **others: Any) -> None:
    """A model that is fused, or else a fused copy, has the loss and the gradients of transformers."""
    fused, inputs = fused or fuse(copy.deepcopy(plain)), {**batch(), **others}
    assert_near(loss_and_grads(fused, **inputs), loss_and_grads(plain, **inputs))


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "not fused" in record.getMessage()]


@pytest.mark.parametrize("name", FUSED)
def test_losses_and_gradients_are_those_of_transformers(name: str, silence: None) -> None:
    model = build(name)
    fused = fuse(copy.deepcopy(model))
    positions = torch.stack([torch.arange(9), torch.arange(9) + 5])
    for others in (
        {},
        {"attention_mask": PADDED},
        {"attention_mask": PADDED.flip(1)},
        {"position_ids": positions},
    ):
        check_fused(model, fused, **others)


ROWS = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4], [0, 1, 0, 1, 2, 3, 4, 5, 6]])
"""Positions of several sequences in a row; whether transformers separates them depends on the cache."""

Case = tuple[str, dict[str, Any], dict[str, Any]]
CASES: dict[str, Case] = {
    **{
        f"several, cache {cache}": ("Llama", {}, {"position_ids": ROWS, "use_cache": cache})
        for cache in (None, True, False)
    },
    "biases": ("Llama", {"attention_bias": True, "mlp_bias": True}, {"attention_mask": PADDED}),
    "eager": ("Llama", {"attn_implementation": "eager"}, {"attention_mask": PADDED}),
    "GeGLU": ("Llama", {"hidden_act": "gelu_new"}, {"attention_mask": PADDED}),
    "the trainer's number of items": ("Llama", {}, {"num_items_in_batch": torch.tensor(7)}),
    **{
        f"window {size}": ("Mistral", {"sliding_window": size, "use_cache": False}, {}) for size in (4, 9, 20)
    },
    "a decoder without its encoder": ("GPT-2", {"add_cross_attention": True}, {"use_cache": True}),
}


@pytest.mark.parametrize(("name", "options", "others"), CASES.values(), ids=CASES)
def test_options_of_models_and_calls(name: str, options: Any, others: Any, silence: None) -> None:
    check_fused(build(name, **options), **others)


def test_the_kernels_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers' own code, which would give the same numbers, does not run."""
    fused = fuse(build("Llama"))
    for kind in {type(module) for module in fused.modules() if is_fused(module)}:
        plain = vars(kind)["plain_class"]
        if not plain.__name__.endswith(("RotaryEmbedding", "ForCausalLM")):
            monkeypatch.setattr(plain, "forward", None)
    monkeypatch.setattr(nn.Linear, "forward", None)
    fused(**batch()).loss.backward()


def test_a_layer_has_the_bits_of_our_transformer_layer() -> None:
    layer, tables = _llama_layer_and_tables(fuse(build("Llama")).bfloat16())
    attention, mlp = layer.self_attn, layer.mlp
    qkv, gate_up = [attention.q_proj, attention.k_proj, attention.v_proj], [mlp.gate_proj, mlp.up_proj]
    ours = TransformerLayer(
        32,
        48,
        4,
        2,
        1e-6,
        0.0,
        0.0,
        kv_channels=8,
        activation="swiglu",
        attn_input_format="bshd",
        normalization="RMSNorm",
        bias=False,
        fuse_qkv_params=True,
        qkv_weight_interleaved=False,
        params_dtype=torch.bfloat16,
    )
    in_order = [qkv, [layer.input_layernorm], [attention.o_proj], [layer.post_attention_layernorm]]
    in_order += [gate_up, [mlp.down_proj]]
    with torch.no_grad():
        for parameter, modules in zip(ours.parameters(), in_order, strict=True):
            parameter.copy_(torch.cat([module.weight for module in modules]))
    x = torch.randn(2, 16, 32, dtype=torch.bfloat16)
    for _ in range(2):
        with fp8.autocast(recipe=fp8.DelayedScaling()):
            found = layer(x, attention_mask=None, position_embeddings=tables)
            expected = ours(x, rotary_pos_emb=tables_of(tables))
            found.backward(x)
            expected.backward(x)
        assert torch.equal(found, expected)
    for parameter, modules in zip(ours.parameters(), in_order, strict=True):
        assert torch.equal(torch.cat([module.weight.grad for module in modules]), parameter.grad)


def _llama_layer_and_tables(model: Any) -> Any:
    tables = model.model.rotary_emb(torch.zeros(1, dtype=torch.bfloat16), torch.arange(16)[None])
    return model.model.layers[0], tables


@pytest.mark.parametrize("name", ["Llama", "GPT-2"])
def test_it_writes_the_same_text(name: str) -> None:
    model = build(name).eval()
    expected = generated(model, [5, 7, 11], 6)
    assert torch.equal(generated(fuse(model), [5, 7, 11], 6), expected)


def test_logits_are_there_where_they_are_asked_for() -> None:
    model = build("Llama")
    expected = model(**batch()).logits
    fused = fuse(model)
    assert fused(**batch()).logits is None
    assert_near([fused(**batch(), skip_logits=False).logits], [expected])
    assert_near([fused.eval()(**batch()).logits], [expected])


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Qwen2", "Qwen3", "Mixtral"])
def test_the_host_does_not_wait_for_positions(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    masks = pytest.importorskip("transformers.masking_utils")
    searched = mock.Mock(side_effect=masks.find_packed_sequence_indices)
    monkeypatch.setattr(masks, "find_packed_sequence_indices", searched)
    model = build(name, use_cache=False)
    model.config.sliding_window = None
    fused = fuse(copy.deepcopy(model))
    searched.reset_mock()
    found = loss_and_grads(fused, **batch())
    assert not searched.called
    assert_near(found, loss_and_grads(model, **batch()))
    assert searched.called
    # Packed sequences are still separated, and a user's own layer still gets what it needs.
    check_fused(model, fused, position_ids=torch.arange(9).remainder(5).expand(2, -1))
    for each in (model, fused):
        each.model.layers[0] = Masked()
    check_fused(model, fused)


class Masked(nn.Module):
    """A user's own layer, which supports running without a mask."""

    attention_type = "full_attention"

    def forward(self, hidden_states: torch.Tensor, attention_mask: Any = None, **_: Any) -> torch.Tensor:
        return hidden_states if attention_mask is None else hidden_states * attention_mask.sum()


def test_attention_that_looks_ahead() -> None:
    model = build("Llama", use_cache=False)
    for layer in model.model.layers:
        layer.self_attn.is_causal = False
    check_fused(model)


def test_names_classes_and_values_stay_and_copies_are_fused() -> None:
    model = build("Llama")
    before = {name: type(module).__name__ for name, module in model.named_modules()}
    values = {name: value.clone() for name, value in model.state_dict().items()}
    fused = fuse(model)
    assert fused is model
    assert {name: type(module).__name__ for name, module in fused.named_modules()} == before
    for each in (fused, copy.deepcopy(fused), by_pickle(fused)):
        found = each.state_dict()
        assert list(found) == list(values)
        assert all(torch.equal(found[name], value) for name, value in values.items())
        assert is_fused(each.model.layers[0].mlp)
    assert not is_fused(type(fused)(fused.config))


def test_unfuse_leaves_no_trace() -> None:
    model = build("Llama")
    plain = copy.deepcopy(model)
    fuse(model)(**batch()).loss.backward()
    unfuse(model)
    for found, expected in zip(model.modules(), plain.modules(), strict=True):
        assert type(found) is type(expected)
        assert vars(found).keys() == vars(expected).keys()
        assert found._buffers.keys() == expected._buffers.keys()
    assert_raises(ValueError, "is not fused", unfuse, model)


def test_scales_of_fp8_are_in_checkpoints_but_not_in_save_pretrained(tmp_path: Path) -> None:
    fused = fuse(build("Llama"))
    tokens = batch()["input_ids"].repeat(1, 2)[:, :16]
    with fp8.autocast(recipe=fp8.DelayedScaling()):
        fused(input_ids=tokens, labels=tokens).loss.backward()
    assert any("fp8" in name for name in fused.state_dict())
    fused.save_pretrained(tmp_path)
    again = unfuse(fused).state_dict()
    loaded = type(fused).from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in again.items())
    assert loaded.keys() == again.keys()


# ---- what is left to transformers -----------------------------------------------------------------------


def test_a_hook_runs_and_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    model = build("Llama")
    fused, calls = fuse(copy.deepcopy(model)), []
    for layer in fused.model.layers:
        layer.mlp.gate_proj.register_forward_hook(lambda *_: calls.append("gate"))
    fused.model.layers[1].self_attn.register_forward_hook(lambda *_: calls.append("attention"))
    for _ in range(2):
        assert_near([fused(**batch()).loss], [model(**batch()).loss])
    assert calls == 2 * ["gate", "attention", "gate"]
    assert said(caplog) == [
        "LlamaMLP is computed by transformers, not fused: gate_proj has hooks",
        "LlamaAttention is computed by transformers, not fused: it has hooks",
    ]


@pytest.mark.parametrize("how", ["hook", "backward hook", "forward"])
def test_a_changed_head_makes_logits(how: str, caplog: pytest.LogCaptureFixture) -> None:
    """A changed head is expected to return logits, not a loss."""
    model = build("Llama")
    fused = fuse(copy.deepcopy(model))
    for each in (model, fused):
        if how == "hook":
            each.lm_head.register_forward_hook(lambda module, given, logits: 0.5 * logits)
        elif how == "backward hook":
            each.lm_head.register_full_backward_hook(lambda module, grads, _: tuple(0.5 * x for x in grads))
        else:
            each.lm_head.forward = lambda x, plain=each.lm_head.forward: 0.5 * plain(x)
    check_fused(model, fused)
    (line,) = said(caplog)
    assert line.startswith(
        "the loss of LlamaForCausalLM is computed by transformers, not fused: its head has"
    )


def test_an_activation_without_a_kernel(caplog: pytest.LogCaptureFixture) -> None:
    model = build("Llama", hidden_act="gelu")
    check_fused(model)
    assert [line for line in said(caplog) if "GELUActivation" in line]


def test_biases_that_come_and_go() -> None:
    model = build("Qwen2")
    fused = fuse(copy.deepcopy(model))
    for added in (False, True):
        fused(**batch())
        for each in (model, fused):
            for layer in each.model.layers:
                for name in ("q_proj", "k_proj", "v_proj"):
                    linear = getattr(layer.self_attn, name)
                    linear.bias = nn.Parameter(torch.full((linear.out_features,), 0.5)) if added else None
                for linear in (layer.mlp.gate_proj, layer.mlp.up_proj) if added else ():
                    linear.bias = nn.Parameter(torch.full((linear.out_features,), 0.5))
        check_fused(model, fused)


def test_an_argument_that_only_transformers_knows() -> None:
    model = build("Llama")
    assert model(**batch(), is_causal=False).loss != model(**batch()).loss
    for others in ({"is_causal": False}, {"weight": torch.ones(VOCAB)}):
        check_fused(model, **others)


def test_attention_weights_come_from_transformers() -> None:
    model = build("Llama", attn_implementation="eager").eval()
    fused = fuse(copy.deepcopy(model))
    asked = {"output_attentions": True, "output_hidden_states": True}
    expected, found = model(**batch(), **asked), fused(**batch(), **asked)
    of_both = [[*each.attentions, *each.hidden_states] for each in (found, expected)]
    assert_near(of_both[0], of_both[1])


def test_the_probe_finds_another_version(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from transformers.models.llama.modeling_llama import LlamaMLP

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * (1e-3 + self.up_proj(x)))

    forward.__module__ = LlamaMLP.__module__
    monkeypatch.setattr(LlamaMLP, "forward", forward)
    model = build("Llama")
    fused = fuse(copy.deepcopy(model))
    assert not is_fused(fused.model.layers[0].mlp)
    assert is_fused(fused.model.layers[0].self_attn)
    check_fused(model, fused)
    (line,) = said(caplog)
    assert line.startswith("LlamaMLP is computed by transformers, not fused: a small one, fused, is off by")


def test_dropout_is_that_of_its_module() -> None:
    """The module may be switched separately, or replaced."""
    model = build("GPT-2", resid_pdrop=0.5, embd_pdrop=0.0, attn_pdrop=0.0)
    fused = fuse(copy.deepcopy(model))
    expected = fused.eval()(**batch()).loss
    for each in (model, fused):
        each.train()
        for layer in each.transformer.h:
            layer.attn.resid_dropout.eval()
            layer.mlp.dropout.eval()
    check_fused(model, fused)
    fused.eval().transformer.h[0].mlp.dropout.train()
    assert not torch.equal(fused(**batch()).loss, expected)
    for each in (model, fused):
        for layer in each.train().transformer.h:
            layer.attn.resid_dropout, layer.mlp.dropout = nn.Identity(), nn.Hardtanh(-0.1, 0.1)
    check_fused(model, fused)


def test_a_linear_with_options_is_called_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    """A GEMM in its place would not be summed over ranks, or leave nothing for `backward_dw`."""
    fused = fuse(build("Llama"))
    attention, mlp = fused.model.layers[0].self_attn, fused.model.layers[1].mlp
    attention.o_proj = Linear(32, 32, bias=False, delay_wgrad_compute=True)
    mlp.up_proj = Linear(32, 48, bias=False, parameters_split=("a_", "b_"))
    fused(**batch()).loss.backward()
    assert attention.o_proj.weight.grad is None
    attention.o_proj.backward_dw()
    assert attention.o_proj.weight.grad is not None and mlp.up_proj.a_weight.grad is not None
    (line,) = said(caplog)
    assert line.startswith(
        "LlamaMLP is computed by transformers, not fused: up_proj is a Linear with options"
    )
    split = Linear(32, 64, parallel_mode="row", tp_size=2)
    assert "ranks" in (no_linear("o_proj", split, transposed=False) or "")


# ---- the order of calls ---------------------------------------------------------------------------------


def test_the_wrong_order_raises() -> None:
    fused = fuse(build("Llama"))
    assert_raises(ValueError, "LlamaForCausalLM is fused already; unfuse it first", fuse, fused)
    wrapped = FlatFSDP(build("Llama"), optimize_backward_concat=False)
    assert_raises(ValueError, "sharded already; fuse first, then shard", fuse, wrapped)
    with pytest.raises(ValueError, match=r"Linear has no layer that is fused; known are .*LlamaDecoderLayer"):
        fuse(nn.Linear(2, 2))


def test_convert_and_fuse_in_both_orders(silence: None) -> None:
    model = build("Llama")
    options: dict[str, Any] = {"filter": lambda linear, name: "_proj" in name, "fp8": False}
    converted = partial(convert, **options, fuse_wgrad_accumulation=False)
    check_fused(model, fuse(converted(copy.deepcopy(model))))
    check_fused(model, converted(fuse(copy.deepcopy(model))))


def test_a_head_that_was_converted_first(caplog: pytest.LogCaptureFixture) -> None:
    model = build("Llama")
    check_fused(model, fuse(convert(copy.deepcopy(model), lambda _, name: name == "lm_head")))
    (line,) = said(caplog)
    assert "its head was converted; fuse before you convert" in line


@needs_peft
@pytest.mark.parametrize("fuse_first", [True, False])
def test_adapters_of_query_and_value_add_to_the_pack_projection(fuse_first: bool, silence: None) -> None:
    adapt = partial(adapted, r=4, target_modules=["q_proj", "v_proj", "o_proj"])
    model = build("Llama")
    fused = adapt(fuse(copy.deepcopy(model))) if fuse_first else fuse(adapt(copy.deepcopy(model)))
    expected = adapt(model)
    check_fused(expected, fused)
    with fused.disable_adapter(), expected.disable_adapter():
        assert_near([fused(**batch()).loss], [expected(**batch()).loss])
