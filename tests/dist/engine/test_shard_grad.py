"""Gradients of views: PyTorch's norms and checks see the whole model; memory goes with the gradients."""

from __future__ import annotations

import copy
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from flatfsdp import Precision
from flatfsdp.engine.storage import grad_norms
from flatfsdp.engine.storage.shard_grad import plain
from flatfsdp.engine.whole.units import named_groups
from flatfsdp.optim import clip
from tests.support.meshes import REPLICATED
from tests.support.models import backward, build, data, grads_of, plain_net, same, update
from tests.support.ranks import of_all_ranks, on_ranks
from tests.support.tp_models import build_tp, data_rank, tp_mesh

Parameters = dict[str, nn.Parameter]


def trained(rank: int, world_size: int, **options: Any) -> tuple[Any, Parameters, Parameters]:
    """A model after a backward, its shards, and the parameters of a plain model with the same gradients."""
    model = build(**options)
    plain = plain_net()
    for other in range(world_size):
        ((tokens,),) = data(other, 1, 1)
        (plain(tokens) / world_size).backward()
    ((tokens,),) = data(rank, 1, 1)
    model(tokens).backward()
    return model, dict(model.named_parameters()), dict(plain.named_parameters())


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Records how many numbers each collective of norms has."""
    counts: list[int] = []
    norm_over = clip.norm_over

    def counting(partners: Any, norm: Tensor, *rest: Any) -> Tensor:
        counts.append(norm.numel())
        return norm_over(partners, norm, *rest)

    for module in (clip, grad_norms):
        monkeypatch.setattr(module, "norm_over", counting)
    return counts


# ---- norms ----------------------------------------------------------------------------------------------


def clipped(ours: Any, theirs: Any, norm_type: float = 2.0, rtol: float = 1e-5, **options: Any) -> Tensor:
    """Clips both, and checks that their norms are close; returns ours."""
    norm = clip_grad_norm_(ours, 0.05, norm_type, **options)
    torch.testing.assert_close(norm, clip_grad_norm_(theirs, 0.05, norm_type), rtol=rtol, atol=0)
    return norm


@pytest.mark.parametrize("part", ["", "blocks.1.", "head.bias"], ids=["all", "a block", "one"])
@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("norm_type", [2.0, 1.0, torch.inf])
@on_ranks(1, 3)
def test_clipping_as_of_a_plain_model(
    rank: int, world_size: int, norm_type: float, foreach: bool | None, part: str
) -> None:
    _, views, plain = trained(rank, world_size)
    ours, theirs = ([p for name, p in each.items() if part in name] for each in (views, plain))
    # The second time, gradients have been clipped.
    for _ in range(2):
        norm = clipped(ours, theirs, norm_type, foreach=foreach)
        assert len({each.item() for each in of_all_ranks(norm)}) == 1


@pytest.mark.parametrize("norm_type", [1.0, 2.0, torch.inf])
@pytest.mark.parametrize("options", [{}, REPLICATED], ids=str)
@on_ranks(2)
def test_clipping_is_that_of_the_model(rank: int, options: dict[str, Any], norm_type: float) -> None:
    ours, theirs = (build(**options) for _ in range(2))
    ((tokens,),) = data(rank, 1, 1)
    for model in (ours, theirs):
        model(tokens).backward()
    before = grads_of(ours)
    norm = clip_grad_norm_(ours.parameters(), 0.05, norm_type)
    torch.testing.assert_close(norm, theirs.clip_grad_norm_(0.05, norm_type), rtol=1e-6, atol=0)
    for model in (ours, theirs):
        torch.testing.assert_close(grads_of(model), [grad * (0.05 / (norm + 1e-6)) for grad in before])
    for parameter in theirs.parameters():
        parameter.grad.fill_(torch.nan)
    with pytest.raises(RuntimeError, match="norm is nan"):
        theirs.clip_grad_norm_(1.0, norm_type, error_if_nonfinite=True)


@pytest.mark.parametrize(
    ("sizes", "options"),
    [((2, 2), {}), ((2, 2), {"replicates": True}), ((2, 1, 2), {}), ((1, 4), {"cpu_offload": True})],
    ids=["zero3", "replicated", "hybrid", "tp4-offload"],
)
@on_ranks(4)
def test_clipping_with_tensor_parallelism(rank: int, sizes: tuple[int, ...], options: dict[str, Any]) -> None:
    """Each part of a split parameter counts, and what all ranks have once."""
    mesh = tp_mesh(*sizes)
    ours, theirs = (build_tp(mesh, **options) for _ in range(2))
    ((tokens,),) = data(data_rank(mesh), 1, 1)
    for model in (ours, theirs):
        model(tokens).backward()
    norm = clip_grad_norm_(ours.parameters(), 0.05)
    torch.testing.assert_close(norm, theirs.clip_grad_norm_(0.05), rtol=1e-6, atol=0)
    torch.testing.assert_close(grads_of(ours), grads_of(theirs), rtol=1e-6, atol=0)


@on_ranks(2)
def test_all_norms_are_taken_in_one_collective(rank: int, world_size: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        counts = counted(patch)
        _, views, _ = trained(rank, world_size)
        clip_grad_norm_(views.values(), 0.05)
        clip_grad_norm_(views.values(), 0.05)
        assert counts == [len(views)] * 2
        # Who asks for one at a time, and writes in between, does not have all taken each time.
        for view in views.values():
            view.grad.div_(view.grad.norm() + 1.0)
        assert set(counts) == {1, len(views)}
        assert counts.count(len(views)) <= len(views) // 2


@on_ranks(2)
def test_norms_of_one_gradient_in_all_spellings(rank: int, world_size: int) -> None:
    _, views, plain = trained(rank, world_size)
    name = "blocks.0.up.weight"
    grad, whole = views[name].grad, plain[name].grad.flatten()
    for ask in (
        lambda g: g.norm(),
        lambda g: g.norm(1),
        lambda g: g.norm(p=torch.inf),
        lambda g: g.norm(dim=0, keepdim=True),
        lambda g: torch.norm(g, 3.0),
        lambda g: torch.linalg.norm(g),
        lambda g: torch.linalg.vector_norm(g, ord=1, dtype=torch.float64),
        lambda g: g.data.norm(2),
        lambda g: g.detach().norm(2),
        lambda g: (g / 4).norm(),
        lambda g: torch._foreach_norm([g, torch.ones(3)])[0],
        lambda g: torch._foreach_mul([g], 0.5)[0].norm(),
        lambda g: torch.where(g > 0, g, 0.0).norm(),
        lambda g: (torch.ones(g.shape) * g).norm(),
        lambda g: torch._foreach_mul([torch.ones(g.shape)], [g])[0].norm(),
        lambda g: torch.maximum(torch.zeros(g.shape), g).norm(),
    ):
        norm, expected = ask(grad), ask(whole)
        assert (norm.dtype, norm.shape) == (expected.dtype, expected.shape)
        torch.testing.assert_close(norm, expected, rtol=1e-5, atol=0)
    with pytest.raises(ValueError, match="norm of order -1"):
        torch.linalg.vector_norm(grad, -1)
    with pytest.raises(ValueError, match=r"order 2\.0, dim 1 of a gradient"):
        grad.norm(2.0, dim=1)
    for ask in (lambda: grad.abs().max(), lambda: torch.amin(grad, dim=0), lambda: grad.min()):
        with pytest.raises(ValueError, match=r"norm\(torch\.inf\)"):
            ask()
    # Of this rank's elements.
    assert torch.equal(grad.abs().sum(), grad.as_subclass(Tensor).abs().sum())


@on_ranks(2)
def test_what_replaces_a_gradient_knows_whose_it_is(rank: int, world_size: int) -> None:
    _, views, plain = trained(rank, world_size)
    for each in (*views.values(), *plain.values()):
        each.grad = each.grad / 2
    clipped(views.values(), plain.values())


@on_ranks(2)
def test_moments_that_a_step_writes_belong_to_no_gradient(rank: int, world_size: int) -> None:
    """So no step makes an object for each parameter, which nobody would use."""
    _, views, _ = trained(rank, world_size)
    grads = [view.grad for view in views.values()]
    moments = [torch.zeros_like(plain(grad)) for grad in grads]
    found = torch._foreach_lerp_(moments, grads, 0.5)
    assert {type(each) for each in (*moments, *(found or ()))} == {Tensor}


@on_ranks(2)
def test_writes_between_two_questions_are_seen(rank: int, world_size: int) -> None:
    """A write counts even through `.data`, which no version counts."""
    _, views, plain = trained(rank, world_size)
    for each in (views, plain):
        assert each["blocks.0.up.weight"].grad.norm() > 0
        each["blocks.1.up.weight"].grad.data.mul_(3)
    norm, expected = (each["blocks.1.up.weight"].grad.norm() for each in (views, plain))
    torch.testing.assert_close(norm, expected, rtol=1e-5, atol=0)


@on_ranks(2)
def test_a_gradient_of_unknown_origin_is_not_half_of_a_norm(rank: int, world_size: int) -> None:
    _, views, _ = trained(rank, world_size)
    views["head.bias"].grad = torch.ones_like(views["head.bias"])
    with pytest.raises(RuntimeError, match=r"gradient of head.bias has been replaced .* write into \.grad"):
        clip_grad_norm_(views.values(), 0.05)


@on_ranks(2)
def test_gradients_that_are_not_there_do_not_count(rank: int, world_size: int) -> None:
    _, views, plain = trained(rank, world_size)
    for each in (views, plain):
        each["blocks.1.up.weight"].grad = None
    clipped(views.values(), plain.values())


@on_ranks(2)
def test_norms_of_narrow_gradients_are_fp32(rank: int, world_size: int) -> None:
    bf16 = torch.bfloat16
    precision = Precision(param=bf16, compute=bf16, grad=bf16)
    _, views, plain = trained(rank, world_size, precision=precision)
    assert clipped(views.values(), plain.values(), rtol=2e-2).dtype == torch.float32


# ---- GradScaler -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [False, True])
@on_ranks(2)
def test_a_plain_scaler_skips_on_all_ranks(rank: int, world_size: int, fused: bool) -> None:
    model, views, _ = trained(rank, world_size)
    optimizer = torch.optim.AdamW(views.values(), lr=1e-2, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
    before = [view.detach().clone() for view in views.values()]
    for is_bad in (True, False):
        optimizer.zero_grad()
        ((tokens,),) = data(rank, 1, 1)
        scaler.scale(model(tokens)).backward()
        if is_bad and rank == 1:
            next(view for view in views.values() if view.numel()).grad[0] = torch.inf
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == (2.0 if is_bad else 4.0)
        assert same(before, [view.detach() for view in views.values()]) == is_bad


# ---- where they are -------------------------------------------------------------------------------------


def tensors_of(model: Any) -> list[weakref.ref[Tensor]]:
    return [weakref.ref(grad) for _, group in named_groups(model) for grad in group.master.grads]


@on_ranks(1, 2)
def test_memory_is_freed_with_the_last_gradient(rank: int, world_size: int) -> None:
    model, views, _ = trained(rank, world_size)
    pack = tensors_of(model)
    assert len(pack) == len(named_groups(model))
    kept = next(iter(views.values()))
    for view in views.values():
        if view is not kept:
            view.grad = None
    assert any(each() is not None for each in pack)
    kept.grad = None
    assert all(each() is None for each in pack)


@on_ranks(2)
def test_gradients_add_up_to_one_that_somebody_else_has_set(rank: int, world_size: int) -> None:
    """Then there is no gradient of all shards together."""
    ours, views, _ = trained(rank, world_size)
    whole = build()
    ((tokens,),) = data(rank, 1, 1)
    whole(tokens).backward()
    views["head.bias"].grad = views["head.bias"].grad.clone()
    for model in (ours, whole):
        model(tokens).backward()
    assert same(grads_of(ours), grads_of(whole))


@on_ranks(2)
def test_a_write_between_microbatches_is_no_zero_grad(rank: int) -> None:
    """Norms of gradients without elements on this rank, or with zeros only."""
    models = []
    ((first, second),) = data(rank, 1, 2)
    for scale in (1.0, 0.5):
        model = build()
        model(first).backward()
        with model.no_sync():
            model(second).backward()
        for parameter in model.parameters():
            parameter.grad.mul_(scale)
        model(second).backward()
        models.append(model)
    whole, halved = ([plain(p.grad) for p in model.parameters()] for model in models)
    models[0].zero_grad()
    models[0](first).backward()
    expected = [grad - of_first / 2 for grad, of_first in zip(whole, grads_of(models[0]), strict=True)]
    torch.testing.assert_close(halved, expected, rtol=1e-5, atol=1e-7)


@on_ranks(2)
def test_copies_and_pickles_are_ordinary_tensors(rank: int, world_size: int) -> None:
    _, views, _ = trained(rank, world_size)
    for view in views.values():
        for copied in (copy.deepcopy(view.grad), pickle.loads(pickle.dumps(view.grad))):
            assert type(copied) is Tensor
            assert torch.equal(copied, view.grad.as_subclass(Tensor))


# ---- optimizers and hooks -------------------------------------------------------------------------------


@on_ranks(2)
def test_hooks_of_shards_run_once_their_gradients_are_there(rank: int) -> None:
    """An optimizer in the backward steps for each parameter, and no gradient stays."""
    whole, viewed = build(), build()
    views = dict(viewed.named_parameters())
    reference = torch.optim.AdamW(whole.parameters(), lr=1e-2)
    own = {view: torch.optim.AdamW([view], lr=1e-2) for view in views.values()}
    calls: list[nn.Parameter] = []

    def hook(view: nn.Parameter) -> None:
        assert not torch.is_grad_enabled()
        calls.append(view)
        update(own[view])

    handles = [view.register_post_accumulate_grad_hook(hook) for view in views.values()]
    for batches in data(rank, 3, 2):
        for model in (whole, viewed):
            backward(model, batches)
        update(reference)
        assert len(calls) == len(set(calls)) == len(views)
        calls.clear()
        masters = ([group.master.flat for _, group in named_groups(model)] for model in (whole, viewed))
        assert same(*masters)
    assert all(view.grad is None for view in views.values())
    for handle in handles:
        handle.remove()
    ((tokens,),) = data(rank, 1, 1)
    viewed(tokens).backward()
    assert calls == []
