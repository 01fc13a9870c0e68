"""A checkpoint of another model or optimizer is refused by name, before anything is read or changed."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from flatfsdp import Precision, by_class, checkpoint, optim, shard
from flatfsdp.checkpoint import loading
from tests.support.checkpoints import equal, full_state
from tests.support.ranks import on_ranks


def build(sizes: list[int], *, scale: bool = False, **options: Any) -> tuple[Any, torch.optim.Optimizer]:
    """Linear layers between these sizes, after one step."""
    torch.manual_seed(len(sizes))
    net = nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(sizes)))
    if scale:
        net.register_buffer("scale", torch.ones(2, dtype=torch.float64))
    model = shard(net, by_class(nn.Linear), **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(torch.randn(3, sizes[0])).float().square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


@on_ranks(2)
def test_each_misfit_is_named_on_every_rank(tmp_path: Path) -> None:
    model, optimizer = build([4, 5, 6])
    checkpoint.save(tmp_path, model, optimizer)
    messages = []
    bf16 = Precision(param=torch.bfloat16, compute=torch.bfloat16)
    for others, with_optimizer in (
        (build([4, 5, 6, 7]), True),
        (build([4, 5, 8]), True),
        (build([4, 5]), False),
        (build([4, 5, 6], precision=bf16), False),
        (build([4, 5, 6], scale=True), False),
    ):
        before = full_state(*others)
        never = AssertionError("something was read")
        with (
            pytest.raises(ValueError, match="not of this model") as caught,
            mock.patch.object(loading.dcp, "load", side_effect=never),
        ):
            checkpoint.load(tmp_path, others[0], others[1] if with_optimizer else None)
        assert equal(full_state(*others), before)
        messages.append(str(caught.value).removeprefix("the checkpoint is not of this model: "))
    assert messages == [
        "2.weight, 2.bias are missing in the checkpoint",
        "1.weight ((6, 5), here (8, 5)), 1.bias ((6,), here (8,)) are of another shape",
        "1.bias, 1.weight are only in the checkpoint; accept=('surplus',) leaves them out",
        "0.weight (torch.float32, here torch.bfloat16), 0.bias (torch.float32, here torch.bfloat16), "
        "1.weight (torch.float32, here torch.bfloat16), and 1 more, are of another dtype; "
        "accept=('dtype',) converts them",
        "scale is missing in the checkpoint",
    ]


@on_ranks(2)
def test_what_is_accepted_is_loaded(tmp_path: Path) -> None:
    model, optimizer = build([4, 5, 6])
    checkpoint.save(tmp_path, model, optimizer)
    saved = checkpoint.full_state_dict(model)

    short, its_optimizer = build([4, 5])
    checkpoint.load(tmp_path, short, its_optimizer, accept={"surplus"})
    state = checkpoint.full_state_dict(short)
    assert equal(dict(state), {name: saved[name] for name in state})

    bf16, _ = build([4, 5, 6], precision=Precision(param=torch.bfloat16, compute=torch.bfloat16))
    checkpoint.load(tmp_path, bf16, accept=["dtype"])
    assert equal(dict(checkpoint.full_state_dict(bf16)), {n: v.bfloat16() for n, v in saved.items()})


@on_ranks(2)
def test_another_class_of_optimizer(tmp_path: Path) -> None:
    model, optimizer = build([4, 5])
    checkpoint.save(tmp_path / "adamw", model, optimizer)
    sgd = torch.optim.SGD(model.parameters(), lr=0.5)
    before = full_state(model, sgd)
    with pytest.raises(
        ValueError, match=r"state of AdamW, and the optimizer is SGD.*accept=\('optimizer',\)"
    ):
        checkpoint.load(tmp_path / "adamw", model, sgd)
    assert equal(full_state(model, sgd), before)
    checkpoint.load(tmp_path / "adamw", model, sgd, accept=("optimizer",))
    assert sgd.param_groups[0]["lr"] == 1e-2

    ours = optim.AdamW(model.parameters(), lr=0.5)
    checkpoint.load(tmp_path / "adamw", model, ours)
    assert ours.param_groups[0]["lr"] == 1e-2
    checkpoint.save(tmp_path / "model", model)
    with pytest.raises(ValueError, match="has no optimizer state; save it with"):
        checkpoint.load(tmp_path / "model", model, ours)


def test_only_what_can_differ_can_be_accepted(tmp_path: Path) -> None:
    model, _ = build([4, 5])
    for accept, found in ((["shape"], "shape"), ("dtype", "dtype")):
        with pytest.raises(
            ValueError, match=rf"collection of 'dtype', 'surplus', 'optimizer', 'lanes'; it has '{found}'"
        ):
            checkpoint.load(tmp_path, model, accept=accept)  # type: ignore[arg-type]
