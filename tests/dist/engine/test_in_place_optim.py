"""Our optimizers over a model that is sharded in place, against those over a wrapped one, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from flatfsdp import Precision, auto_wrap, by_class, checkpoint, microbatches, param_groups, shard
from flatfsdp.contract.whole_shape import whole_shape
from flatfsdp.engine.whole.units import named_groups
from flatfsdp.optim import SGD, AdamW
from tests.support.both_forms import WAYS, sharded
from tests.support.models import Block, Net, data
from tests.support.ranks import on_ranks

BF16 = torch.bfloat16
NO_DECAY = {"params": lambda name, shape: len(shape) < 2, "weight_decay": 0.0}


def decay_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Parameter groups as users write them."""
    small = [p for p in model.parameters() if len(whole_shape(p)) < 2]
    large = [p for p in model.parameters() if len(whole_shape(p)) >= 2]
    return [{"params": small, "weight_decay": 0.0}, {"params": large}]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"optimize_backward_concat": False},
        {"precision": Precision(compute=BF16), "reshard_after_forward": False},
        {"precision": Precision(param=BF16, compute=BF16, grad=torch.float32)},
        {"cpu_offload": True},
    ],
    ids=["on", "off", "bf16 zero2", "bf16 storage", "offload"],
)
@pytest.mark.parametrize("kind", [AdamW, SGD])
@on_ranks(1, 3)
def test_in_place_is_wrapped(rank: int, kind: Any, options: dict[str, Any]) -> None:
    """Decay groups and clipping in the step; from the third step on with the wrapped model's state."""
    models: list[Any] = []
    for make in (auto_wrap, shard):
        torch.manual_seed(0)
        models.append(make(Net(), by_class(Block), **{"optimize_backward_concat": True, **options}))
    wrapped, in_place = models
    momentum = {"momentum": 0.9} if kind is SGD else {}
    optimizers = [
        kind(groups, lr=1e-2, weight_decay=0.1, max_grad_norm=0.3, **momentum)
        for groups in (param_groups(wrapped, [NO_DECAY]), decay_groups(in_place))
    ]
    for number, batches in enumerate(data(rank, 4, 2)):
        for model, optimizer in zip(models, optimizers, strict=True):
            for tokens in microbatches(model, batches):
                model(tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert torch.equal(optimizers[0].grad_norm, optimizers[1].grad_norm)
        for (_, ours), (_, theirs) in zip(named_groups(in_place), named_groups(wrapped), strict=True):
            assert torch.equal(ours.master.flat, theirs.master.flat)
        if number == 1:
            state = checkpoint.full_optimizer_state_dict(wrapped, optimizers[0])
            checkpoint.load_full_optimizer_state_dict(in_place, optimizers[1], state)


@on_ranks(2)
def test_norms_over_several_models_are_added_up_as_of_wrappers(rank: int) -> None:
    """Models are added up like stages of a pipeline: the first one whole, then the second."""
    models, optimizers = [], []
    for way in WAYS:
        torch.manual_seed(0)
        models.append([sharded(way, Net(), by_class(Block)) for _ in range(2)])
        parameters = [p for model in models[-1] for p in model.parameters()]
        optimizers.append(AdamW(parameters, lr=1e-2, max_grad_norm=0.3))
    for (tokens,) in data(rank, 20, 1):
        for of_way, optimizer in zip(models, optimizers, strict=True):
            for index, model in enumerate(of_way):
                (model(tokens) * (1 + 2 * index)).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert torch.equal(optimizers[0].grad_norm, optimizers[1].grad_norm)


@pytest.mark.parametrize("way", WAYS)
@on_ranks(2)
def test_pytorchs_clipping_and_scaler_see_the_model(rank: int, way: str) -> None:
    torch.manual_seed(0)
    model = sharded(way, Net(), by_class(Block))
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
    for value, (_, group) in zip(before, named_groups(model), strict=True):
        assert torch.equal(value, group.master.flat)


@on_ranks(2)
def test_pytorchs_clipping_of_cut_portions_raises(rank: int) -> None:
    """A rank may have nothing of a group, so ranks would not all ask for the norm of the same portion."""
    torch.manual_seed(0)
    model = auto_wrap(Net(), by_class(Block), optimize_backward_concat=False)
    groups = param_groups(model, [NO_DECAY])
    ((tokens,),) = data(rank, 1, 1)
    model(tokens).backward()
    parameters = [p for group in groups for p in group["params"]]
    with pytest.raises(RuntimeError, match=r"param_groups has cut.*model\.clip_grad_norm_"):
        nn.utils.clip_grad_norm_(parameters, 1.0)


@on_ranks(2)
def test_what_is_accumulated_is_watched_by_one_marker_a_view(rank: int) -> None:
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
