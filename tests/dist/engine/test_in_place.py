"""`shard`: a model stays the same object, with its class, names and methods."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from flatfsdp import FlatFSDP, Precision, Prefetch, by_class, register_forward_method, shard
from flatfsdp.compat.fairscale import FullyShardedDataParallel
from flatfsdp.contract.whole_shape import whole_shape
from flatfsdp.engine.api.classes import FlatFSDPModule
from tests.support.checkpoints import equal
from tests.support.fp8_layers import seeded
from tests.support.models import WIDTH, Block, Net, plain_net, train_for_losses
from tests.support.ranks import of_all_ranks, on_ranks


def in_place(net: Callable[[], nn.Module] = Net, **options: Any) -> Any:
    return shard(plain_net(net), by_class(Block), **options)


BF16 = Precision(compute=torch.bfloat16)


# ---- what stays -----------------------------------------------------------------------------------------


@on_ranks(2)
def test_class_names_and_signature_stay(rank: int) -> None:
    plain, model = plain_net(), in_place()
    assert isinstance(model, Net) and isinstance(model, FlatFSDPModule)
    assert type(model).__name__ == "Net" and type(model).__module__ == Net.__module__
    assert inspect.signature(model.forward) == inspect.signature(plain.forward)
    assert [name for name, _ in model.named_modules()] == [name for name, _ in plain.named_modules()]
    listed, theirs = dict(model.named_parameters()), dict(plain.named_parameters())
    assert list(listed) == list(theirs)
    for name, view in listed.items():
        assert view.is_leaf and view.dim() == 1 and whole_shape(view) == theirs[name].shape
        assert torch.equal(torch.cat(of_all_ranks(view.detach())), theirs[name].detach().flatten())
    assert any(view.numel() == 0 for view in listed.values())
    weight = model.head.weight
    assert isinstance(weight, nn.Parameter) and weight.shape == theirs["head.weight"].shape


@on_ranks(2)
def test_a_new_module_of_its_class_is_a_plain_one() -> None:
    model = shard(nn.Sequential(Block(), Block()), by_class(Block))
    assert type(model[:1]) is nn.Sequential
    assert type(in_place())(blocks=1)(torch.zeros(1, 2, dtype=torch.int64)).dim() == 0


# ---- methods --------------------------------------------------------------------------------------------


class Talker(Net):
    """A model with methods other than forward."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def scaled(self, tokens: Tensor) -> Tensor:
        return self.logits(tokens) * self.scale


def grads_as_plain(model: Any, net: nn.Module, compute: Callable[[Any], Tensor]) -> None:
    """The same loss of a sharded model and of a plain one, on the same data on all ranks."""
    loss, expected = compute(model), compute(net)
    torch.testing.assert_close(loss, expected)
    loss.backward()
    expected.backward()
    views = dict(model.named_parameters())
    for name, parameter in net.named_parameters():
        if parameter.grad is None:
            assert views[name].grad is None, name
        else:
            torch.testing.assert_close(torch.cat(of_all_ranks(views[name].grad)), parameter.grad.flatten())


TOKENS = torch.arange(12).view(2, 6)


def by_parts(model: Any) -> Tensor:
    x = model.embedding(TOKENS)
    for block in model.blocks:
        x = block(x)
    return sum((model.head(chunk).logsumexp(-1).mean() for chunk in x.chunk(2, 1)), torch.zeros(()))


def by_a_method(model: Any) -> Tensor:
    return model.logits(TOKENS).square().mean()


def by_one_part(model: Any) -> Tensor:
    return model.head(torch.ones(2, 20)).sum()


@pytest.mark.parametrize("compute", [by_a_method, by_parts, by_one_part])
@pytest.mark.parametrize("flag", [True, False])
@on_ranks(2)
def test_any_method_may_call_what_is_inside(compute: Callable[[Any], Tensor], flag: bool) -> None:
    for model in (in_place(optimize_backward_concat=flag), shard(plain_net(), optimize_backward_concat=flag)):
        grads_as_plain(model, plain_net(), compute)


@on_ranks(2)
def test_a_method_that_reads_a_parameter_is_registered() -> None:
    model = in_place(Talker)
    register_forward_method(model, "scaled")
    grads_as_plain(model, plain_net(Talker), lambda m: m.scaled(TOKENS).square().mean())
    with pytest.raises(TypeError, match="neither sharded nor a part"):
        register_forward_method(nn.Linear(1, 1), "forward")


class Recursive(nn.Module):
    """A module that calls itself, and has a method that does."""

    def __init__(self) -> None:
        super().__init__()
        self.up = Block()
        self.scale = nn.Parameter(torch.full((1,), 3.0))
        self.criterion = nn.MSELoss()

    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        return self.up(x if depth == 0 else self(x, depth - 1)) * self.scale

    def score(self, x: Tensor) -> Tensor:
        return self(x) * self.scale


@on_ranks(2)
def test_a_module_that_calls_itself_keeps_its_parameters() -> None:
    x = torch.randn(4, WIDTH)
    plain = plain_net(Recursive)
    model = shard(plain_net(Recursive))
    register_forward_method(model, "score")
    with torch.no_grad():
        assert torch.equal(model.score(x), plain.score(x))
    model.score(x).sum().backward()
    plain.score(x).sum().backward()
    (norms, expected) = ([p.grad.norm() for p in each.parameters()] for each in (model, plain))
    torch.testing.assert_close(norms, expected)


@on_ranks(2)
def test_a_module_without_parameters_is_nobodys_part(rank: int) -> None:
    """It computes in the dtype of its input, and on one rank alone if only that rank calls it."""
    model = shard(plain_net(Recursive), precision=BF16)
    if rank == 0:
        assert model.criterion(torch.ones(2), torch.zeros(2)).dtype == torch.float32
    assert model(torch.ones(1, WIDTH, dtype=torch.bfloat16)).dtype == torch.bfloat16


@on_ranks(2)
def test_a_part_is_compiled_whole(rank: int) -> None:
    counts = []
    for make in (plain_net, in_place):
        compiled: list[int] = []

        def backend(graph: Any, _inputs: Any, compiled: list[int] = compiled) -> Any:
            compiled.append(1)
            return graph.forward

        torch._dynamo.reset()
        model: Any = make(Tower)
        model.tower.compile(backend=backend)
        model(torch.ones(2, WIDTH)).sum().backward()
        counts.append(len(compiled))
    assert counts == [1, 1]


@on_ranks(2)
def test_a_part_is_compiled_from_outside(rank: int) -> None:
    torch._dynamo.reset()
    model: Any = in_place(Tower)
    net = plain_net(Tower)
    x = torch.randn(2, WIDTH)
    model(x)
    compiled = torch.compile(model.tower, backend="eager")
    for _ in range(2):
        assert torch.equal(compiled(x), net.tower(x))
        assert torch.equal(model(x), net(x))


class Tower(nn.Module):
    """A block, and layers below a module that is a part."""

    def __init__(self, outer: bool = True) -> None:
        super().__init__()
        self.tower = Tower(outer=False) if outer else nn.Linear(WIDTH, WIDTH)
        self.block = Block() if outer else nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.tower(x))


@on_ranks(2)
def test_a_layer_may_be_called_before_the_model(rank: int) -> None:
    model, net = in_place(), plain_net()
    x = torch.randn(2, 20)
    assert torch.equal(model.blocks[1](x), net.blocks[1](x))
    assert torch.equal(model(TOKENS), net(TOKENS))


# ---- whole parameters -----------------------------------------------------------------------------------


@on_ranks(2)
def test_state_dicts_are_whole() -> None:
    model, net = in_place(), plain_net()
    assert equal(model.state_dict(), net.state_dict())
    for part, plain in ((model.head, net.head), (model.blocks[1], net.blocks[1])):
        assert equal(part.state_dict(), plain.state_dict())
    around = nn.ModuleDict({"model": model})
    assert equal(dict(around.state_dict()), {f"model.{key}": v for key, v in net.state_dict().items()})
    with pytest.raises(RuntimeError, match="this rank's parts"):
        model.blocks[0].up.state_dict()
    other = seeded(Net, 7)
    model.load_state_dict(other.state_dict())
    assert equal(model.state_dict(), other.state_dict())
    assert torch.equal(model(TOKENS), other(TOKENS))
    model.head.load_state_dict(net.head.state_dict())
    assert equal(model.head.state_dict(), net.head.state_dict())


@on_ranks(2)
def test_each_rank_goes_its_own_way_while_it_is_unsharded(rank: int) -> None:
    model, net = in_place(), plain_net()
    with torch.no_grad():
        with model.unsharded():
            for _ in range(1 + 2 * rank):
                assert torch.equal(model(TOKENS), net(TOKENS))
            if rank == 1:
                assert torch.equal(model.logits(TOKENS), net.logits(TOKENS))
        assert torch.equal(model(TOKENS), net(TOKENS))
    train_for_losses(model, rank)
    after = model.state_dict()
    net.load_state_dict(after)
    with model.unsharded():
        assert torch.equal(model(TOKENS), net(TOKENS))
        model.blocks[0].register_forward_pre_hook(lambda *_: model.unsharded().__enter__())
        with pytest.raises(RuntimeError, match=r"unsharded\(\) inside a forward"):
            model(TOKENS)


@on_ranks(2)
def test_a_unit_is_unsharded_by_hand() -> None:
    model, net = in_place(), plain_net()
    model.unshard()
    assert torch.equal(model.head.weight, net.head.weight)
    assert model.blocks[0].up.weight.isnan().all()
    model.reshard()
    assert model.head.weight.isnan().all()
    handle = model.unshard(async_op=True)
    assert model.head.weight.isnan().all()
    handle.wait()
    assert torch.equal(model.head.weight, net.head.weight)
    model.reshard()
    handle.wait()
    assert model.head.weight.isnan().all()


def test_whether_gradients_are_reduced_is_said_as_in_fsdp2() -> None:
    model = in_place()
    model.set_requires_gradient_sync(False, recurse=True)
    assert not model.fsdp_state.shared.microbatch.is_last
    model.blocks[0].set_requires_gradient_sync(True, recurse=False)
    with pytest.raises(ValueError, match="all units of a model reduce in the same backwards"):
        model.set_requires_gradient_sync(False, recurse=False)
    assert model.fsdp_state.shared.microbatch.is_last


# ---- hooks ----------------------------------------------------------------------------------------------


@on_ranks(2)
def test_hooks_of_flat_parameters_run_or_raise(rank: int) -> None:
    model, seen = FullyShardedDataParallel(plain_net()), []
    model.flat_param.register_post_accumulate_grad_hook(lambda flat: seen.append(flat.grad.shape))
    model(TOKENS).backward()
    assert seen == [model.flat_param.shape]
    model.flat_param.register_hook(lambda grad: grad)
    with pytest.raises(RuntimeError, match="parameter flat_param has a tensor hook"):
        model(TOKENS)


def test_a_hook_that_needs_a_leaf_needs_the_flag() -> None:
    layer = nn.Linear(2, 2)
    layer.bias.register_post_accumulate_grad_hook(lambda parameter: None)
    with pytest.raises(ValueError, match="parameter bias has a post-accumulate-gradient hook"):
        shard(layer, optimize_backward_concat=False)


@on_ranks(2)
def test_hooks_of_what_is_listed_run_or_raise(rank: int) -> None:
    model, seen = in_place(), []
    for name, view in model.named_parameters():
        view.register_post_accumulate_grad_hook(lambda view, name=name: seen.append((name, view.grad.shape)))
    model(TOKENS).backward()
    assert sorted(seen) == sorted((name, view.shape) for name, view in model.named_parameters())
    model.head.weight.register_hook(lambda grad: seen.clear())
    model(TOKENS).backward()
    assert len(seen) < 2 * len(list(model.parameters()))
    handle = dict(model.named_parameters())["head.weight"].register_hook(lambda grad: grad)
    with pytest.raises(RuntimeError, match=r"parameter head\.weight has a tensor hook"):
        model(TOKENS)
    handle.remove()
    model(TOKENS)


# ---- wrong uses -----------------------------------------------------------------------------------------


@on_ranks(2)
def test_what_fails_while_all_is_gathered_is_not_kept() -> None:
    model = in_place()
    failing = model.blocks[1].fsdp_state
    with (
        mock.patch.object(type(failing), "show", _failing_for(failing)),
        pytest.raises(MemoryError),
        model.unsharded(),
    ):
        pass
    assert not any(unit.fsdp_state.is_kept for unit in (model, *model.blocks))
    assert model.head.weight.isnan().all()
    model(TOKENS).backward()


def _failing_for(failing: Any) -> Callable[..., None]:
    show = type(failing).show

    def fails(self: Any, action: Any) -> None:
        if self is failing:
            raise MemoryError
        show(self, action)

    return fails


@on_ranks(2)
def test_what_cannot_be_sharded() -> None:
    model = in_place()
    with pytest.raises(TypeError, match=r"^shard\(\) got an unexpected keyword argument 'reshard'"):
        shard(plain_net(), by_class(Block), reshard=True)
    with pytest.raises(TypeError, match="shard takes a module, and then the policy, not a list first"):
        shard([nn.Linear(2, 2), nn.Linear(2, 2)])  # type: ignore[type-var]
    with pytest.raises(ValueError, match="a ModuleList is never called"):
        shard(nn.ModuleList([Block()]))
    tied = plain_net()
    tied.blocks[1].up = tied.blocks[0].up
    with pytest.raises(ValueError, match="is tied to"):
        shard(tied, by_class(Block))
    with pytest.raises(TypeError, match="cannot be copied"):
        copy.deepcopy(model)
    with pytest.raises(TypeError, match="cannot be copied or pickled"):
        copy.deepcopy(model.head)
    with pytest.raises(TypeError, match="cannot be moved or converted"):
        model.head.to(torch.float64)
    with pytest.raises(ValueError, match=r"the result of torch\.compile"):
        shard(torch.compile(nn.Linear(2, 2)))


@on_ranks(2)
def test_a_model_that_is_refused_leaves_its_layers_as_they_were() -> None:
    """A layer that is a model of its own keeps its name, and trains on."""
    layer = shard(nn.Linear(2, 2), prefetch=Prefetch(2, 2))
    layer(torch.ones(1, 2)).sum().backward()
    model = shard(nn.Sequential(nn.Linear(2, 2), layer))
    with pytest.raises(ValueError, match="unit 1 needs the prefetch of its root"):
        model(torch.ones(1, 2))
    assert layer.fsdp_state.name == "root" and not model.fsdp_state.is_used
    layer(torch.ones(1, 2)).sum().backward()


class Closed(nn.Linear):
    """A class from which no class can be derived without arguments."""

    def __init_subclass__(cls, kind: str) -> None:
        super().__init_subclass__()


def _closed(net: nn.Module) -> nn.Module:
    net.last = Closed(2, 2)
    return net


def _counting(net: nn.Module) -> nn.Module:
    net.count = nn.Parameter(torch.zeros(3, dtype=torch.int64), requires_grad=False)
    return net


@pytest.mark.parametrize(
    ("spoil", "error"), [(_closed, "Closed cannot be sharded"), (_counting, "parameter count is")]
)
@on_ranks(2)
def test_a_refused_model_is_as_it_was(spoil: Callable[[nn.Module], nn.Module], error: str) -> None:
    model: Any = spoil(plain_net())
    before = dict(model.named_parameters())
    for make in (shard, partial(shard, policy=by_class(Block)), FlatFSDP):
        with pytest.raises((TypeError, ValueError), match=error):
            make(model)
        assert not any(isinstance(each, FlatFSDPModule) for each in model.modules())
        assert dict(model.named_parameters()).keys() == before.keys()
        assert all(parameter is before[name] for name, parameter in model.named_parameters())
    model(TOKENS).backward()
