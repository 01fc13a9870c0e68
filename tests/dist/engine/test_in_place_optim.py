"""Local shards in the hands of PyTorch: groups by shape, clipping, a scaler, and markers in `.grad`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from flatfsdp import by_class, param_groups, shard
from flatfsdp.contract.whole_shape import whole_shape
from flatfsdp.engine.whole.units import named_groups
from tests.support.models import Block, Net, build, data, same
from tests.support.ranks import on_ranks

NO_DECAY = {"params": lambda name, shape: len(shape) < 2, "weight_decay": 0.0}


def decay_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Parameter groups as users write them."""
    small = [p for p in model.parameters() if len(whole_shape(p)) < 2]
    large = [p for p in model.parameters() if len(whole_shape(p)) >= 2]
    return [{"params": small, "weight_decay": 0.0}, {"params": large}]


@on_ranks(1, 3)
def test_groups_by_whole_shape_are_those_of_param_groups() -> None:
    model = shard(Net(), by_class(Block))
    groups = zip(decay_groups(model), param_groups(model, [NO_DECAY]), strict=True)
    for by_shape, by_name in groups:
        assert {*by_shape.pop("params")} == {*by_name.pop("params")}
        assert by_shape == by_name


@on_ranks(2)
def test_pytorchs_clipping_and_scaler_see_the_model(rank: int) -> None:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    ((tokens, bad),) = data(rank, 1, 2)
    scaler.scale(model(tokens)).backward()
    scaler.unscale_(optimizer)
    norm = model.clip_grad_norm_(torch.inf)
    found = nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    torch.testing.assert_close(found, norm, rtol=1e-6, atol=0)
    torch.testing.assert_close(model.clip_grad_norm_(1.0), torch.tensor(1e-3), rtol=1e-2, atol=0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    before = [group.master.flat.detach().clone() for _, group in named_groups(model)]
    scaler.scale(model(bad)).backward()
    if rank == 1:
        next(p for p in model.parameters() if p.numel()).grad[0] = torch.nan
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0
    assert same(before, [group.master.flat for _, group in named_groups(model)])


@on_ranks(2)
def test_what_is_accumulated_is_watched_by_one_marker_a_parameter(rank: int) -> None:
    model = shard(Net(), by_class(Block))
    ((first, second, last),) = data(rank, 1, 3)
    markers = []
    for _ in range(2):
        for tokens in (first, second):
            with model.no_sync():
                model(tokens).backward()
            markers.append([p.grad for p in model.parameters()])
        model(last).backward()
        model.zero_grad()
    assert all(a is b for each in markers[1:] for a, b in zip(each, markers[0], strict=True))
