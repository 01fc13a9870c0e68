"""Units are the layers that transformers names; models on the meta device get the values it would give."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import nn

from flatfsdp import shard
from flatfsdp.compat.transformers import init_weights_of, policy_of
from flatfsdp.engine.api.classes import FlatFSDPModule
from tests.support.assertions import assert_raises
from tests.support.ecosystem.families import FAMILIES, batches_of, needs_peft, needs_transformers
from tests.support.ecosystem.fused import MODELS
from tests.support.ecosystem.training import assert_same_values
from tests.support.ranks import on_ranks

pytestmark = needs_transformers


def units_of(model: Any) -> set[str]:
    """Classes of the units inside a model that is sharded by its policy."""
    sharded = shard(model, policy_of(model))
    return {
        type(each).__name__
        for each in sharded.modules()
        if isinstance(each, FlatFSDPModule) and each is not model
    }


@on_ranks(2)
def test_each_layer_is_a_unit(rank: int) -> None:
    """BERT's embeddings, which transformers also names, are tied to its head and stay outside."""
    for name, family in MODELS.items():
        model: Any = family.build()
        layers = sum(type(module).__name__ == family.layer for module in model.modules())
        assert units_of(model) == {family.layer}, name
        assert sum(isinstance(module, FlatFSDPModule) for module in model.modules()) == layers + 1


@needs_peft
@on_ranks(2)
def test_of_what_is_around_a_model_or_not_a_layer_itself(rank: int) -> None:
    import peft
    from transformers import RobertaPreLayerNormConfig, RobertaPreLayerNormModel

    family = FAMILIES["Llama"]
    adapted = peft.get_peft_model(family.build(), peft.LoraConfig(target_modules=["q_proj"]))
    assert units_of(adapted) == {family.layer}
    assert units_of(nn.Sequential(family.build())) == {family.layer}
    # It names the attention inside its layers.
    config = RobertaPreLayerNormConfig(num_hidden_layers=1, hidden_size=12, intermediate_size=12)
    assert units_of(RobertaPreLayerNormModel(config)) == {"RobertaPreLayerNormLayer"}


@on_ranks(2)
def test_a_model_without_known_layers_is_refused(rank: int) -> None:
    transformers = importlib.import_module("transformers")
    assert_raises(ValueError, r"Linear has no _no_split_modules.*by_class", policy_of, nn.Linear(2, 2))
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(num_hidden_layers=0))
    assert_raises(ValueError, r"no module of LlamaDecoderLayer in a list.*by_class", policy_of, model)


@on_ranks(2)
def test_a_model_from_the_meta_device_has_the_values_of_transformers(rank: int) -> None:
    """Buffers and constants are equal, and matrices have the same spread, which differs between some."""
    for name, family in FAMILIES.items():
        plain: Any = family.build()
        with torch.device("meta"):
            model: Any = family.build()
        with pytest.raises(ValueError, match=r"param_init_fn=flatfsdp.*init_weights_of"):
            shard(model, policy_of(model), device="cpu")
        torch.manual_seed(1)
        shard(model, policy_of(model), device="cpu", param_init_fn=init_weights_of(model))
        assert_same_values(dict(model.named_buffers()), dict(plain.named_buffers()))
        found = model.state_dict()
        for key, value in plain.state_dict().items():
            if value.numel() == 1 or not value.std():
                assert torch.equal(found[key], value), (name, key)
            elif value.numel() > 500:
                assert found[key].std() / value.std() == pytest.approx(1, abs=0.2), (name, key)
        assert model(**batches_of(rank, 0)[0]).loss.isfinite()


@needs_peft
@on_ranks(2)
def test_adapters_on_the_meta_device_begin_at_nothing(rank: int) -> None:
    import peft

    def adapted(**options: Any) -> Any:
        with torch.device("meta"):
            model = FAMILIES["Llama"].build()
        return peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], **options))

    model = adapted()
    shard(model, policy_of(model), device="cpu", param_init_fn=init_weights_of(model))
    values = {key: value for key, value in model.state_dict().items() if "lora_" in key}
    assert len(values) == 4 and all(bool(value.any()) == ("lora_A" in key) for key, value in values.items())
    with pytest.raises(ValueError, match=r"lora_\w+\.default is an adapter on the meta device.*with values"):
        init_weights_of(adapted(use_dora=True))
    with pytest.raises(ValueError, match=r"lm_head is trained whole .*with values"):
        init_weights_of(adapted(modules_to_save=["lm_head"]))


@on_ranks(2)
def test_values_for_what_is_no_model_of_transformers(rank: int) -> None:
    assert_raises(ValueError, r"Linear is no model of transformers", init_weights_of, nn.Linear(2, 2))
    with torch.device("meta"):
        model: Any = nn.Sequential(FAMILIES["Llama"].build(), nn.Linear(8, 8))
    init = init_weights_of(model)
    model.append(nn.Linear(8, 8, device="meta"))
    with pytest.raises(ValueError, match=r"Linear was not there when init_weights_of"):
        shard(model, policy_of(model), device="cpu", param_init_fn=init)


@on_ranks(2)
def test_values_of_modules_around_the_model(rank: int) -> None:
    def around(*others: nn.Module) -> Any:
        with torch.device("meta"):
            return nn.Sequential(FAMILIES["Llama"].build(), nn.Linear(8, 8), *others)

    model = around()
    shard(model, policy_of(model), device="cpu", param_init_fn=init_weights_of(model))
    # As nn.Linear begins, which fills neither with one value nor with large ones.
    weight = model.state_dict()["1.weight"]
    assert weight.unique().numel() > 32 and weight.abs().max() <= 8**-0.5
    model = around(nn.ParameterList([nn.Parameter(torch.empty(8, device="meta"))]))
    with pytest.raises(ValueError, match=r"ParameterList around the model .* without reset_parameters"):
        shard(model, policy_of(model), device="cpu", param_init_fn=init_weights_of(model))
