"""Fused models under FlatFSDP: the engine's joints are what their GEMMs read."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flatfsdp import Precision, fp8
from flatfsdp.compat.transformers import fuse, unfuse
from flatfsdp.contract.joint import is_joined, joined
from tests.support.both_forms import sharded
from tests.support.ecosystem.families import needs_peft, needs_transformers
from tests.support.ecosystem.fused import FUSED, assert_near, batch, build, train
from tests.support.ranks import on_ranks

pytestmark = needs_transformers


@pytest.mark.parametrize("name", ["Llama", "Qwen2", "Qwen3", "GPT-2"])
@on_ranks(2)
def test_flag_on_and_off_are_equal_and_near_plain_transformers(rank: int, world_size: int, name: str) -> None:
    found = []
    for way, flag, reshard in (("wrapped", True, True), ("in place", False, True), ("in place", True, False)):
        options = {"optimize_backward_concat": flag, "reshard_after_forward": reshard}
        model = sharded(way, fuse(build(name)), FUSED[name].is_unit, **options)
        found.append(train(model, [rank], is_sharded=True))
    for each in found[1:]:
        assert all(torch.equal(one, other) for one, other in zip(each, found[0], strict=True))
    expected = train(build(name), range(world_size), is_sharded=False)
    # Changes of values that are larger than they.
    assert_near(found[0][4:], expected[4 * world_size :], tolerance=1e-4)


@on_ranks(2)
def test_query_key_and_value_are_one_operand_without_a_copy() -> None:
    model = sharded("in place", fuse(build("Llama")), FUSED["Llama"].is_unit)
    attention, seen = model.model.layers[0].self_attn, []

    def look(*_: Any) -> None:
        weight = joined(attention, attention.declared_joints()[0])
        assert weight is not None
        parts = (attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight)
        seen.append([each.data_ptr() for each in weight.split((32, 16, 16))])
        seen.append([each.data_ptr() for each in parts])

    model.model.layers[0].register_forward_pre_hook(look)
    model(**batch())
    assert seen[0] == seen[1]
    with pytest.raises(ValueError, match="sharded already; unfuse it before"):
        unfuse(model)


@on_ranks(2)
def test_weights_that_only_fused_gemms_read_are_kept_in_fp8(rank: int) -> None:
    precision = Precision(compute=torch.bfloat16, fp8_weights=fp8.CurrentScaling())
    found = []
    for flag in (True, False):
        options: dict[str, Any] = {"optimize_backward_concat": flag, "precision": precision}
        model = sharded("in place", fuse(build("Llama")), FUSED["Llama"].is_unit, **options)
        tokens = torch.randint(1, 64, (2, 16), generator=torch.Generator().manual_seed(rank))
        with fp8.autocast(recipe=fp8.DelayedScaling(reduce_amax=False)):
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
        found.append([loss.detach(), *(p.grad for p in model.parameters())])
        with torch.no_grad(), fp8.autocast(recipe=fp8.CurrentScaling()):
            assert model.eval()(input_ids=tokens, labels=tokens).loss.isfinite()
            model.model.layers[0].mlp.gate_proj.register_forward_hook(lambda *_: None)
            with pytest.raises(RuntimeError, match="its weights are kept in FP8, which transformers cannot"):
                model(input_ids=tokens)
    for on, off in zip(*found, strict=True):
        assert torch.equal(on, off)


@needs_peft
@on_ranks(2)
def test_adapters_train_over_a_frozen_joint(rank: int, world_size: int) -> None:
    import peft

    def adapted(module: Any) -> Any:
        torch.manual_seed(3)
        config = peft.LoraConfig(r=16, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        return peft.get_peft_model(module, config)

    model = sharded("in place", adapted(fuse(build("Llama"))), FUSED["Llama"].is_unit)
    expected = train(adapted(build("Llama")), range(world_size), is_sharded=False)
    assert_near(train(model, [rank], is_sharded=True)[4:], expected[4 * world_size :], tolerance=1e-4)
    assert is_joined(model.base_model.model.model.layers[0].self_attn, "qkv_weight")
