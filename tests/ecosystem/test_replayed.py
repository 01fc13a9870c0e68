"""Hugging Face models with gradient checkpointing, replayed on a tape that stands for CUDA graphs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.support.ecosystem.families import needs_transformers
from tests.support.ranks import on_ranks
from tests.support.replaying.cases import HUGGING_FACE, Case, recompute_layers
from tests.support.replaying.steps import evaluation, steps_of, trained
from tests.support.tape import taped

pytestmark = needs_transformers
# A tape does not know how random numbers are drawn.
RECOMPUTED = [case for case in HUGGING_FACE if case.built is recompute_layers and "dropout" not in case.name]


@pytest.mark.parametrize("case", RECOMPUTED, ids=lambda case: case.name)
@on_ranks(2)
def test_gradient_checkpointing_is_recorded(rank: int, case: Case) -> None:
    """Although transformers registers a hook for it, which only asks for gradients of the embedding."""
    steps = steps_of(case, evaluation, steps=8)
    expected = trained(case, rank, False, steps)
    with taped():
        found = trained(case, rank, True, steps)
    assert found.has_bits_of(expected)
    assert found.step.replays > 0


@on_ranks(1)
def test_another_hook_beside_it_keeps_microbatches_eager(rank: int) -> None:
    case = RECOMPUTED[0]
    calls: list[int] = []

    def hook(case: Case, model: torch.nn.Module, optimizer: object) -> None:
        def count(_module: object, _args: object, _output: Tensor) -> None:
            calls.append(1)

        model.get_input_embeddings().register_forward_hook(count)  # type: ignore[operator]

    with taped():
        found = trained(case, rank, True, steps_of(case, hook, steps=8))
    # One hook from the fifth step on, and two from the seventh.
    assert len(calls) == case.count * (2 + 2)
    assert found.step.replays > 0
