"""With lanes, any number of ranks has the bits of one, which are those of the plain program."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatfsdp import Precision
from flatfsdp.comm.lanes import Lanes
from tests.support.meshes import HYBRID, REPLICATED
from tests.support.models import VOCAB, backward, build, plain_net, update
from tests.support.ranks import run_ranks

STEPS, TOTAL = 3, 24
BF16 = Precision(compute=torch.bfloat16, reduce=torch.bfloat16)
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "1 rank": (1, {}),
    "2 ranks": (2, {}),
    "3 ranks, ZeRO-2": (3, {"reshard_after_forward": False}),
    "4 ranks, flag off": (4, {"optimize_backward_concat": False}),
    "6 ranks": (6, {}),
    "2 replicas": (2, REPLICATED),
    "3 replicas, flag off": (3, {**REPLICATED, "optimize_backward_concat": False}),
}
IN_BLOCKS: dict[str, tuple[int, dict[str, Any]]] = {
    **{name: LAYOUTS[name] for name in ("1 rank", "2 ranks", "4 ranks, flag off", "6 ranks", "2 replicas")},
    "2 x 2": (4, HYBRID),
    "2 x 1": (2, HYBRID),
    "2 x 2, flag off, ZeRO-2": (
        4,
        {**HYBRID, "optimize_backward_concat": False, "reshard_after_forward": False},
    ),
}


def microbatch(step: int, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + number)
    return torch.randint(0, VOCAB, (2, 7), generator=generator)


class OfStep(nn.Module):
    """The share of one microbatch in the loss of a step."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(tokens) / TOTAL


def trained(rank: int, world_size: int, lanes: Lanes, options: dict[str, Any]) -> dict[str, Tensor]:
    """Whole weights after some steps of AdamW with clipping."""
    model = build(lanes=lanes, **options)
    numbers = lanes.microbatches(model.fsdp_state.grid, TOTAL)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        backward(OfStep(model), [microbatch(step, number) for number in numbers])
        update(optimizer)
    return model.state_dict()


def of_plain_program() -> dict[str, Tensor]:
    model = plain_net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        for number in range(TOTAL):
            (model(microbatch(step, number)) / TOTAL).backward()
        update(optimizer)
    return model.state_dict()


def differing(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


@pytest.mark.parametrize("name", LAYOUTS)
def test_any_number_of_ranks_has_the_bits_of_the_plain_program(name: str) -> None:
    world_size, options = LAYOUTS[name]
    expected = of_plain_program()
    found = run_ranks(world_size, trained, Lanes(TOTAL), options)
    assert [differing(each, expected) for each in found] == [[]] * world_size


@pytest.mark.parametrize("lanes", [Lanes(12), Lanes(12, block=2), Lanes(24, block=4)], ids=str)
@pytest.mark.parametrize("precision", [Precision(), BF16], ids=["fp32", "bf16, bf16 wire"])
def test_all_layouts_have_the_same_bits(lanes: Lanes, precision: Precision) -> None:
    layouts = LAYOUTS if lanes.block == 1 else IN_BLOCKS
    expected: dict[str, Tensor] = {}
    for name, (world_size, options) in layouts.items():
        if lanes.block == 4 and world_size == 6:
            continue
        found = run_ranks(world_size, trained, lanes, {"precision": precision, **options})
        expected = expected or found[0]
        assert [differing(each, expected) for each in found] == [[]] * world_size, name
