"""LoRA with PEFT: adapters train, are saved for plain PEFT, and can be disabled."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from flatfsdp import auto_wrap, shard
from flatfsdp.compat.transformers import fuse, policy_of
from flatfsdp.contract.packed import is_packed
from flatfsdp.fp8 import CurrentScaling, autocast
from flatfsdp.layers import convert
from tests.support.assertions import assert_raises
from tests.support.ecosystem.families import (
    FAMILIES,
    adapted,
    batches_of,
    generated,
    needs_peft,
    needs_transformers,
)
from tests.support.ecosystem.folders import shared_folder
from tests.support.ecosystem.fused import MODELS
from tests.support.ecosystem.training import (
    assert_same_training,
    assert_same_values,
    train_plain,
    train_sharded,
)
from tests.support.ranks import on_ranks

pytestmark = [needs_transformers, needs_peft]

LLAMA = FAMILIES["Llama"]
FORMS = ("plain", "fused", "fused later")
"""Whether the base is fused, and whether before or after the adapters are added."""


def with_lora(form: str = "plain") -> Any:
    model = adapted(LLAMA._replace(is_fused=form == "fused").build(), r=4)
    return fuse(model) if form == "fused later" else model


@pytest.mark.parametrize("flag", ["on", "off"])
@pytest.mark.parametrize("zero", ["zero3", "zero2"])
@pytest.mark.parametrize("form", FORMS)
@on_ranks(2)
def test_adapters_train(rank: int, world_size: int, form: str, flag: str, zero: str) -> None:
    options = {"optimize_backward_concat": flag == "on", "reshard_after_forward": zero == "zero3"}
    model = shard(with_lora(form), LLAMA.is_unit, **options)
    found, expected = train_sharded(model, rank), train_plain(with_lora(form), rank, world_size)
    assert_same_training(found, expected)
    in_plain = train_plain(with_lora(), rank, world_size)
    assert found.losses == pytest.approx(in_plain.losses, rel=1e-5)
    assert list(found.state) == list(in_plain.state)
    base = model.base_model.model.model.layers[0].self_attn
    assert is_packed(base, "qkv_weight") == (form != "plain")


@pytest.mark.parametrize("form", FORMS)
@on_ranks(2)
def test_an_adapter_is_saved_by_one_rank_and_read_by_plain_peft(rank: int, form: str) -> None:
    from peft import PeftModel, get_peft_model_state_dict

    model = shard(with_lora(form), LLAMA.is_unit)
    state = train_sharded(model, rank).state
    with shared_folder() as folder:
        model.save_pretrained(folder / str(rank))
        dist.barrier()
        assert [path.name for path in folder.iterdir()] == ["0"]
        files = {path.name for path in (folder / "0").iterdir()}
        assert {"adapter_config.json", "adapter_model.safetensors"} <= files
        plain = PeftModel.from_pretrained(LLAMA.build(), folder / "0")
    assert_same_values(plain.state_dict(), state)
    adapter = get_peft_model_state_dict(plain)
    assert len(adapter) == 2 * 2 * 2
    assert all(torch.equal(state[key.replace(".weight", ".default.weight")], adapter[key]) for key in adapter)
    (batch, _) = batches_of(rank, 0)
    with torch.no_grad():
        found, expected = (each.eval()(**batch).logits for each in (model, plain))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("form", "flag"), [("plain", "on"), ("plain", "off"), ("fused", "off"), ("fused later", "on")]
)
@on_ranks(2)
def test_a_disabled_adapter_leaves_the_base_model(rank: int, world_size: int, form: str, flag: str) -> None:
    """Adapters are disabled for a reference model, also between forward and backward."""
    model = shard(with_lora(form), LLAMA.is_unit, optimize_backward_concat=flag == "on")
    plain, base = with_lora(form), LLAMA._replace(is_fused=form != "plain").build()
    batch: dict[str, Any] = batches_of(rank, 0)[0]
    # A fused model with labels returns no logits; with a cache, and unsharded, it is not fused.
    del batch["labels"]
    batch["use_cache"] = False
    with model.disable_adapter(), torch.no_grad():
        assert torch.equal(model(**batch).logits, base(**batch).logits)
    assert torch.equal(model(**batch).logits, plain(**batch).logits)
    prompt = (3, 5, 7)[rank:]
    model.eval(), plain.eval(), base.eval()
    with model.disable_adapter():
        assert torch.equal(generated(model, prompt, 3), generated(base, prompt, 3))
    assert torch.equal(generated(model, prompt, 3), generated(plain, prompt, 3))
    trained = train_sharded(model.train(), rank)
    assert_same_training(trained, train_plain(plain.train(), rank, world_size))


_QUERY = {"target_modules": ["q_proj"], "r": 4, "init_lora_weights": False}
_TOKENS = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 4}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "biases": ("LoraConfig", {**_QUERY, "bias": "lora_only"}),
    "DoRA": ("LoraConfig", {**_QUERY, "use_dora": True}),
    "whole head": ("LoraConfig", {**_QUERY, "modules_to_save": ["lm_head"]}),
    "everywhere": ("LoraConfig", {**_QUERY, "target_modules": "all-linear"}),
    "embedding": ("LoraConfig", {**_QUERY, "target_modules": ["v_proj", "embed_tokens"]}),
    "IA3": ("IA3Config", {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]}),
    "prompts": ("PromptTuningConfig", _TOKENS),
    "prefixes": ("PrefixTuningConfig", _TOKENS),
}


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2)
def test_kinds_of_adapters_train_and_are_read_by_plain_peft(rank: int, world_size: int, kind: str) -> None:
    """The numbers are right whatever part of a fused base they leave to transformers."""
    import peft

    config, options = KINDS[kind]
    family = MODELS["Qwen2, fused" if kind == "biases" else "Llama, fused"]

    def configured(base: Any) -> Any:
        torch.manual_seed(1)
        return peft.get_peft_model(base, getattr(peft, config)(**copy.deepcopy(options)))

    in_plain = train_plain(configured(family.plain.build()), rank, world_size, steps=1)
    for of in (family.plain, family):
        model = shard(configured(of.build()), of.is_unit)
        found = train_sharded(model, rank, steps=1)
        if of.is_fused:
            assert found.losses == pytest.approx(in_plain.losses, rel=1e-5)
        expected = train_plain(configured(of.build()), rank, world_size, steps=1) if of.is_fused else in_plain
        assert_same_training(found, expected)
        with shared_folder() as folder:
            model.save_pretrained(folder)
            again = peft.PeftModel.from_pretrained(family.plain.build(), folder)
            assert_same_values(again.state_dict(), found.state)
            if kind == "whole head" and rank == 0:
                # One rank alone, with what all have gathered.
                model.save_pretrained(folder / "alone", state_dict=dict(found.state))
                alone = peft.PeftModel.from_pretrained(family.plain.build(), folder / "alone")
                assert_same_values(alone.state_dict(), found.state)
            if kind == "prompts":
                with pytest.raises(RuntimeError, match="call it on all ranks, without state_dict"):
                    model.save_pretrained(folder, state_dict=dict(found.state))


@pytest.mark.parametrize(
    "target",
    [{"target_modules": "all-linear"}, {"target_modules": ["q_proj"], "target_parameters": ["gate_up_proj"]}],
)
def test_lora_of_routers_and_experts_is_refused(target: dict[str, Any]) -> None:
    family = FAMILIES["Mixtral"]
    model = adapted(family.build(), **target)
    before = dict(model.named_parameters())
    is_router = target["target_modules"] == "all-linear"
    what = r"gate \(weight" if is_router else r"experts \(gate_up_proj"
    message = rf"adapts a parameter of \S*{what} of a Mixtral.*no routers or experts"
    assert_raises(ValueError, message, shard, model, family.is_unit)
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    shard(adapted(family.build(), target_modules=["q_proj"]), family.is_unit)


@on_ranks(2)
def test_merged_adapters_stay_where_they_are(rank: int) -> None:
    """This also holds inside `unsharded`, where otherwise only copies would be merged."""
    model, plain = shard(with_lora(), LLAMA.is_unit), with_lora()
    batch = batches_of(rank, 0)[0]
    for name in ("merge_adapter", "unmerge_adapter"):
        with torch.no_grad():
            before = model(**batch).logits
        with model.unsharded() if name == "merge_adapter" else nullcontext():
            getattr(model, name)()
        getattr(plain, name)()
        assert_same_values(model.state_dict(), plain.state_dict())
        with torch.no_grad():
            torch.testing.assert_close(model(**batch).logits, before)
    base = train_plain(plain, rank, 2, steps=1)
    assert_same_training(train_sharded(model, rank, steps=1), base)


@on_ranks(2)
def test_what_would_take_modules_out_or_bring_others_is_refused(rank: int) -> None:
    import peft

    model = shard(with_lora(), LLAMA.is_unit)
    state = model.state_dict()
    calls = {
        "merge_and_unload": model.merge_and_unload,
        "unload": model.unload,
        "delete_adapter": lambda: model.delete_adapter("default"),
        "add_adapter": lambda: model.add_adapter("other", peft.LoraConfig(target_modules=["v_proj"])),
        "load_adapter": lambda: model.load_adapter("nowhere", "other"),
    }
    for name, call in calls.items():
        assert_raises(RuntimeError, rf"{name} of a \w+ that is sharded: .*(save_pretrained|before)", call)
    assert_same_values(model.state_dict(), state)


@on_ranks(2)
def test_of_several_adapters_one_is_chosen(rank: int, world_size: int) -> None:
    import peft

    def with_two() -> Any:
        model = with_lora()
        torch.manual_seed(2)
        model.add_adapter("other", peft.LoraConfig(target_modules=["k_proj"], init_lora_weights=False))
        return model

    model, plain = shard(with_two(), LLAMA.is_unit), with_two()
    assert_raises(RuntimeError, r"set_adapter of .* inference_mode=True", model.set_adapter, "other")
    with torch.no_grad():
        # As a reference is asked, by TRL.
        model.set_adapter("other"), model.set_adapter("default")
    batch = batches_of(rank, 0)[0]
    found = train_sharded(model, rank)
    assert_same_training(found, train_plain(plain, rank, world_size))
    model.set_adapter("other", inference_mode=True), plain.set_adapter("other", inference_mode=True)
    with torch.no_grad():
        assert torch.equal(model(**batch).logits, plain(**batch).logits)
    with shared_folder() as folder:
        model.save_pretrained(folder)
        if rank == 0:
            model.save_pretrained(folder / "alone", state_dict=dict(found.state))
        dist.barrier()
        for each in (folder, folder / "alone"):
            again = peft.PeftModel.from_pretrained(LLAMA.build(), each, "default")
            again.load_adapter(each / "other", "other")
            assert_same_values(dict(sorted(again.state_dict().items())), dict(sorted(found.state.items())))


@on_ranks(2)
def test_converted_layers_are_adapted_and_saved(rank: int, world_size: int) -> None:
    """Conversion works in either order, in FP8; the saved files are the same as without."""
    import peft

    adapt = partial(adapted, target_modules="all-linear", r=16)

    def converted(model: Any) -> Any:
        return convert(model, lambda layer, name: min(layer.weight.shape) >= 16)

    losses = []
    for model in (adapt(converted(LLAMA.build())), converted(adapt(LLAMA.build()))):
        shard(model, policy_of(model))
        with autocast(recipe=CurrentScaling()):
            trained = train_sharded(model, rank, steps=1)
        losses.append(trained.losses)
        with shared_folder() as folder:
            model.save_pretrained(folder)
            plain = peft.PeftModel.from_pretrained(LLAMA.build(), folder)
        assert_same_values(plain.state_dict(), trained.state)
    exact = train_plain(adapt(LLAMA.build()), rank, world_size, steps=1).losses
    # Only in the second are adapters in FP8.
    for found in losses:
        assert found != exact and found == pytest.approx(exact, rel=0.02)


@on_ranks(2)
def test_adapters_of_a_wrapped_model_are_those_of_the_model_inside(rank: int) -> None:
    from peft import get_peft_model_state_dict

    adapters = []
    for share in (shard, auto_wrap):
        torch.manual_seed(1)
        model: Any = share(with_lora(), LLAMA.is_unit)
        model.merge_adapter()
        model.unmerge_adapter()
        adapters.append(get_peft_model_state_dict(model, state_dict=model.state_dict()))
    assert len(adapters[0]) > 4 and adapters[0].keys() == adapters[1].keys()
    assert all(torch.equal(value, adapters[1][name]) for name, value in adapters[0].items())
