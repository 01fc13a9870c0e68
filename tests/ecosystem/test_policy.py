"""Units are the layers that transformers names, whatever is around the model."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import nn

from flatfsdp import shard
from flatfsdp.compat.transformers import policy_of
from flatfsdp.engine.in_place.classes import FlatFSDPModule
from tests.support.ecosystem.families import FAMILIES, needs_peft, needs_transformers
from tests.support.ecosystem.fused import MODELS
from tests.support.ranks import on_ranks

pytestmark = needs_transformers


def units_of(model: Any) -> set[str]:
    """Classes of the units inside of a model that is sharded by its policy."""
    sharded = shard(model, policy_of(model))
    return {
        type(each).__name__
        for each in sharded.modules()
        if isinstance(each, FlatFSDPModule) and each is not model
    }


@on_ranks(2)
def test_each_layer_is_a_unit(rank: int) -> None:
    """BERT's embeddings, which transformers names too, are tied to its head and stay outside."""
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
    # It names the attention in its layers.
    config = RobertaPreLayerNormConfig(num_hidden_layers=1, hidden_size=12, intermediate_size=12)
    assert units_of(RobertaPreLayerNormModel(config)) == {"RobertaPreLayerNormLayer"}


@on_ranks(2)
def test_a_model_without_known_layers_is_refused(rank: int) -> None:
    transformers = importlib.import_module("transformers")
    with pytest.raises(ValueError, match=r"Linear has no _no_split_modules.*by_class"):
        policy_of(nn.Linear(2, 2))
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(num_hidden_layers=0))
    with pytest.raises(ValueError, match=r"no module of LlamaDecoderLayer in a list.*by_class"):
        policy_of(model)
