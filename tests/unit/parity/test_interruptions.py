"""What `verify --switch replay` does between steps really happens, in turn."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from flatfsdp.parity.any_model import Interruptions

BATCH = (torch.zeros(4, 6), torch.zeros(4, 6))


class Recorded(nn.Module):
    """Notes what is done with it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.seen: list[str] = []

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        tokens_bt, targets_bt = batch
        if tokens_bt.shape != targets_bt.shape:
            self.seen.append("raises")
            raise ValueError("shapes")
        is_evaluated = not self.training and not torch.is_grad_enabled()
        self.seen.append("evaluated" if is_evaluated else "trained")
        return self.weight.sum()

    def microbatch(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        loss = self.loss(batch)
        loss.backward()
        return loss.detach()


def test_each_kind_comes_in_turn() -> None:
    model = Recorded()
    optimizer = torch.optim.SGD(model.parameters())
    interruptions = Interruptions(model, optimizer, model.microbatch, model.loss, nullcontext)
    for step in range(16):
        before, weight = list(model.seen), model.weight.detach().clone()
        # Of a microbatch that failed nothing may stay.
        model.weight.grad = torch.ones(2)
        batches = interruptions.before(step, [BATCH, BATCH])
        expected = {3: ["evaluated"], 7: ["raises"]}.get(step, [])
        assert model.seen == before + expected and model.training
        assert (model.weight.grad is None) == (step == 7)
        shape = (2, 6) if step == 11 else (4, 6)
        assert [tensor.shape for batch in batches for tensor in batch] == [shape] * 4
        # As it was at the evaluation.
        assert torch.equal(model.weight, torch.full((2,), 4.0) if step == 15 else weight)
        with torch.no_grad():
            model.weight += 1


def test_one_sequence_is_cut() -> None:
    model = Recorded()
    interruptions = Interruptions(
        model, torch.optim.SGD(model.parameters()), model.microbatch, model.loss, nullcontext
    )
    ((tokens, targets),) = interruptions.before(11, [(torch.zeros(1, 6), torch.zeros(1, 6))])
    assert tokens.shape == targets.shape == (1, 3)


def test_a_microbatch_that_does_not_raise_is_no_interruption() -> None:
    model = Recorded()
    interruptions = Interruptions(
        model, torch.optim.SGD(model.parameters()), lambda batch: torch.ones(()), model.loss, nullcontext
    )
    with pytest.raises(AssertionError, match="made no error"):
        interruptions.before(7, [BATCH])
