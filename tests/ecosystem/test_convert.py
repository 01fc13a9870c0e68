"""`convert` of Hugging Face models: what it converts, what it logs about the rest, and quantized bases."""

from __future__ import annotations

import copy
import logging
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from flatfsdp import shard
from flatfsdp.compat.transformers import policy_of
from flatfsdp.fp8 import BlockScaling, CurrentScaling, autocast
from flatfsdp.layers import convert
from tests.support.ecosystem.families import FAMILIES, batches_of, needs_transformers
from tests.support.ecosystem.training import assert_same_training, train_plain, train_sharded
from tests.support.ranks import on_ranks

pytestmark = needs_transformers


def suits(layer: Any, name: str) -> bool:
    return all(size % 16 == 0 for size in layer.weight.shape)


@on_ranks(2)
def test_conv1d_computes_as_before_and_in_fp8(rank: int, world_size: int) -> None:
    family = FAMILIES["GPT-2"]
    model = convert(family.build(), suits)
    exact = train_plain(family.build(), rank, world_size, steps=1)
    assert_same_training(train_plain(copy.deepcopy(model), rank, world_size, steps=1), exact)
    shard(model, policy_of(model))
    block = BlockScaling()
    with (
        autocast(recipe=block),
        torch.no_grad(),
        pytest.raises(ValueError, match=r"c_attn|Conv1D\.weight is \[in_features, out_features\]"),
    ):
        model(**batches_of(rank, 0)[0])
    with autocast(recipe=CurrentScaling()):
        losses = train_sharded(model, rank, steps=1).losses
    assert losses != exact.losses and losses == pytest.approx(exact.losses, rel=0.02)


@on_ranks(2)
def test_experts_are_left_and_one_line_says_so(rank: int) -> None:
    with mock.patch.object(logging.getLogger("flatfsdp.layers.convert"), "log") as log:
        convert(FAMILIES["Mixtral"].build(), suits)
        convert(FAMILIES["Llama"].build(), suits)
    mixtral, llama = log.call_args_list
    assert mixtral.args[0] == logging.WARNING and llama.args[0] == logging.INFO
    said = mixtral.args[1] % mixtral.args[2:]
    assert "layers.*.mlp.experts.gate_up_proj (3-D, of MixtralExperts, which is no nn.Linear): 24,576" in said
    assert "embed_tokens.weight (an embedding table): 2,048" in said


class Int8Tensor(Tensor):
    """A tensor like torchao's quantized weights: floating-point from outside, bytes inside."""

    @staticmethod
    def __new__(cls, codes: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.bfloat16)

    def __init__(self, codes: Tensor) -> None:
        self.codes = codes

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if "detach" in str(func) else NotImplemented


@pytest.mark.parametrize("kind", ["torchao", "bitsandbytes"])
@on_ranks(2)
def test_a_quantized_base_is_refused(rank: int, kind: str) -> None:
    model: Any = FAMILIES["Llama"].build()
    codes = torch.ones(32, 32, dtype=torch.int8)
    weight = Int8Tensor(codes) if kind == "torchao" else codes
    model.model.layers[1].self_attn.q_proj.weight = torch.nn.Parameter(weight, requires_grad=False)
    found = "a Int8Tensor" if kind == "torchao" else r"torch\.int8"
    with pytest.raises(ValueError, match=rf"q_proj\.weight is {found}; .* without quantization"):
        shard(model, policy_of(model))
