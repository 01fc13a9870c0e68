"""`flatfsdp.parity.verify` of Hugging Face models, plain and fused."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from flatfsdp import Precision
from flatfsdp.fp8 import CurrentScaling
from flatfsdp.parity import verify
from tests.support.ecosystem.families import FAMILIES, VOCAB, needs_transformers
from tests.support.ranks import on_ranks

pytestmark = needs_transformers


def batches(rank: int, world_size: int) -> Iterator[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(rank)
    while True:
        tokens = torch.randint(0, VOCAB, (2, 16), generator=generator)
        yield {"input_ids": tokens, "labels": tokens}


@pytest.mark.parametrize("name", ["Llama", "GPT-2"])
@on_ranks(2)
def test_plain_models(name: str) -> None:
    found = verify(FAMILIES[name].build, batches, steps=2)
    found.require()
    assert [row.switch for row in found.rows] == ["flag", "reshard"]


@on_ranks(2)
def test_a_fused_llama_in_fp8_with_stored_weights() -> None:
    precision = Precision(compute=torch.bfloat16, fp8_weights=CurrentScaling())
    build = FAMILIES["Llama"]._replace(is_fused=True).build
    found = verify(build, batches, precision=precision, recipe=CurrentScaling(), steps=2)
    found.require()
    assert [row.switch for row in found.rows] == ["flag", "reshard", "fusion", "storage"]
