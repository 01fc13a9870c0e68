"""`flatfsdp.parity.verify` for models of all kinds: equal where they are, or the place where they are not."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatfsdp import Precision, by_class
from flatfsdp.fp8 import CurrentScaling
from flatfsdp.layers import Linear
from flatfsdp.parity import verify
from tests.support.ranks import on_ranks


class Residual(nn.Module):
    """Two convolutions with BatchNorm around a shortcut, as in a ResNet."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.Sequential(Residual(8), Residual(8))
        self.head = nn.Linear(8, 5)

    def forward(self, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.blocks(self.stem(images)).mean((2, 3)))
        return {"logits": logits, "loss": F.cross_entropy(logits, labels)}


def images(rank: int, world_size: int) -> Iterator[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(rank)
    while True:
        yield {
            "images": torch.randn(2, 3, 6, 6, generator=generator),
            "labels": torch.randint(0, 5, (2,), generator=generator),
        }


@on_ranks(2)
def test_a_resnet_with_batch_norm_is_equal_with_all_that_can_be_switched() -> None:
    found = verify(ResNet, images, steps=2)
    found.require()
    assert [row.switch for row in found.rows] == ["flag", "reshard"]
    assert set(found.left_out) == {"fusion", "cache", "storage", "replay", "sync"}
    content = json.loads(found.json())
    assert content["equal"] and content["rows"][0]["off"]["losses"] == content["rows"][0]["on"]["losses"]
    assert len({*content["rows"][0]["off"]["losses"]}) == 2, "nothing was trained"
    assert str(found).startswith("flag off / flag on: equal losses, gradients, ")
    assert str(found).count("equal") == 2


class Counting(nn.Module):
    """A model whose result depends on how often it was built: on the switch, for a test."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        for block in self.blocks:
            x = x + block(x).tanh()
        return x.square().mean()


def rows(rank: int, world_size: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    while True:
        yield torch.randn(4, 6, generator=generator)


@on_ranks(2)
def test_a_planted_bit_is_found_with_step_rank_parameter_and_element() -> None:
    found = verify(Counting, rows, switches=["flag"], policy=by_class(nn.Linear), steps=3, self_test=True)
    assert not found.equal
    (row,) = found.rows
    (place,) = row.differences["gradients"]
    where = r"rank 1: step 1, blocks\.0\.\w+: 1 of \d+ elements, the first \[\d"
    assert re.match(where, place), place
    with pytest.raises(
        AssertionError, match=r"flag off / flag on, gradients: first difference on rank 1: step 1"
    ):
        found.require()


@on_ranks(2)
def test_gradients_of_a_single_microbatch_may_be_reduced_in_each() -> None:
    found = verify(Counting, rows, switches=["sync"], policy=by_class(nn.Linear), steps=2, microbatches=1)
    assert [row.name for row in found.rows] == ["reduced last / reduced each"]
    found.require()


def fp8_model() -> nn.Module:
    return nn.Sequential(*(Linear(32, 32, fuse_wgrad_accumulation=True) for _ in range(2)))


def tokens(rank: int, world_size: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    while True:
        yield torch.randn(16, 32, generator=generator)


def square(model: nn.Module, batch: Any) -> Tensor:
    return model(batch).square().mean()


@on_ranks(2)
def test_fp8_layers_switch_fusion_and_storage_too() -> None:
    precision = Precision(compute=torch.bfloat16, fp8_weights=CurrentScaling())
    found = verify(
        *(fp8_model, tokens),
        precision=precision,
        recipe=CurrentScaling(),
        loss=square,
        policy=by_class(Linear),
        steps=2,
    )
    found.require()
    assert [row.switch for row in found.rows] == ["flag", "reshard", "fusion", "storage"]


class Caching(nn.Module):
    """A model whose FP8 weights can be cast once a step."""

    def __init__(self, seen: list[bool | None]) -> None:
        super().__init__()
        self.seen = seen
        self.layers = nn.ModuleList(Linear(32, 32) for _ in range(2))

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        for layer in self.layers:
            x = layer(x, is_first_microbatch=is_first_microbatch)
        self.seen.append(is_first_microbatch)
        return x.float().square().mean()


@on_ranks(2)
def test_a_model_that_takes_is_first_microbatch_switches_its_cache() -> None:
    precision = Precision(compute=torch.bfloat16)
    seen: list[bool | None] = []
    build = partial(Caching, seen)
    options: dict[str, Any] = {
        "precision": precision,
        "recipe": CurrentScaling(),
        "switches": ["cache"],
        "steps": 2,
    }
    found = verify(build, tokens, **options)
    found.require()
    assert [row.switch for row in found.rows] == ["cache"]
    assert seen == [*4 * [None], True, False, True, False]
    with pytest.raises(ValueError, match="'cache': no layer casts FP8 weights in more than one microbatch"):
        verify(build, tokens, **options, microbatches=1)


@on_ranks(2)
def test_what_cannot_be_verified_says_so() -> None:
    def few(rank: int, world_size: int) -> Iterator[Tensor]:
        yield torch.ones(4, 6)

    for options, message in (
        ({"switches": ["fusion"]}, "switch 'fusion': no layer of the model can fuse"),
        (
            {"switches": ["sync"]},
            "switch 'sync': gradients of several microbatches are added in another order",
        ),
        ({"switches": ["cache"]}, "switch 'cache': the model's forward does not take is_first_microbatch"),
        ({"batches": few}, "batches ended in step 0 on rank"),
        (
            {"build_model": lambda: nn.Sequential(nn.Linear(6, 6))},
            "returns Tensor without a loss; pass loss=",
        ),
        ({"steps": 0}, "steps is 0"),
        ({"switches": ["flags"]}, "'flags' is not a valid Switch"),
    ):
        arguments: dict[str, Any] = {"build_model": Counting, "batches": rows, **options}
        with pytest.raises(ValueError, match=message):
            verify(**arguments)
