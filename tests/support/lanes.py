"""What tests of lanes share: the data of a step, layouts of ranks, and the comparison of their results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.meshes import HYBRID, REPLICATED
from tests.support.models import VOCAB
from tests.support.ranks import run_ranks

Layouts = dict[str, tuple[int, dict[str, Any]]]
"""Numbers of ranks, and options of a model on them."""

FLAG_OFF = {"optimize_backward_concat": False}
ZERO2 = {"reshard_after_forward": False}
LAYOUTS: Layouts = {
    "1 rank": (1, {}),
    "2 ranks": (2, {}),
    "3 ranks, ZeRO-2": (3, ZERO2),
    "4 ranks, flag off": (4, FLAG_OFF),
    "6 ranks": (6, {}),
    "2 replicas": (2, REPLICATED),
    "3 replicas, flag off": (3, {**REPLICATED, **FLAG_OFF}),
}
IN_BLOCKS: Layouts = {
    **{name: LAYOUTS[name] for name in ("1 rank", "2 ranks", "4 ranks, flag off", "2 replicas")},
    "2 x 2": (4, HYBRID),
    "2 x 1": (2, HYBRID),
    "2 x 2, flag off, ZeRO-2": (4, {**HYBRID, **FLAG_OFF, **ZERO2}),
}
"""Those that have whole blocks of 2 or 4 lanes."""


def microbatch(step: int, number: int) -> Tensor:
    """Tokens for the models of `models.py`; no two microbatches have the same."""
    return torch.randint(0, VOCAB, (2, 7), generator=torch.Generator().manual_seed(1000 * step + number))


class OfStep(nn.Module):
    """The share of one microbatch in the loss of a step of `total`."""

    def __init__(self, model: Any, total: int) -> None:
        super().__init__()
        self.model, self.total = model, total

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(tokens) / self.total


def differing(found: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    """The names whose tensors differ."""
    assert found.keys() == expected.keys()
    return [name for name in found if not torch.equal(found[name], expected[name])]


def assert_same_bits(
    expected: dict[str, Tensor], world_size: int, case: Callable[..., dict[str, Tensor]], *args: Any
) -> None:
    """Asserts that `case(rank, world_size, *args)` returns what is expected, on each rank."""
    found = run_ranks(world_size, case, *args)
    assert [differing(each, expected) for each in found] == [[]] * world_size, (world_size, args)


def assert_layouts_agree(
    layouts: Layouts, case: Callable[..., dict[str, Tensor]], *args: Any
) -> dict[str, Tensor]:
    """Asserts that `case(rank, world_size, *args, options)` returns the same on all ranks of all layouts.

    Returns:
        The result.
    """
    first, *others = layouts.values()
    expected: dict[str, Tensor] = run_ranks(first[0], case, *args, first[1])[0]
    for world_size, options in others:
        assert_same_bits(expected, world_size, case, *args, options)
    return expected
