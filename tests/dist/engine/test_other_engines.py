"""A second engine around a sharded model, around something that contains one, or inside: refused, in the call
that is wrong, before it changes anything."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DataParallel, DistributedDataParallel

from flatfsdp import auto_wrap, by_class, shard
from flatfsdp.contract.whole_shape import whole_shape
from flatfsdp.engine.whole.units import named_groups
from tests.support.models import Block, Net, build, data, flat, grads_of, same
from tests.support.ranks import on_ranks

TOKENS = torch.zeros(2, 7, dtype=torch.long)


class Lightning(nn.Module):
    """A module that contains a sharded one, and has a parameter of its own."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(3))
        self.net = net

    def forward(self, tokens: Tensor) -> Tensor:
        return self.net(tokens) + self.bias.sum()


def _fully_shard(module: nn.Module) -> Any:
    return fully_shard(module, mesh=init_device_mesh("cpu", (2,)))


def _fully_shard_two(module: nn.Module) -> Any:
    return fully_shard([nn.Linear(2, 2), module], mesh=init_device_mesh("cpu", (2,)))


def _replicate(module: nn.Module) -> Any:
    from torch.distributed._composable.replicate import replicate

    return replicate(module)


def _replicate_with_fsdp(module: nn.Module) -> Any:
    replicate = pytest.importorskip("torch.distributed._composable.replicate_with_fsdp").replicate
    return replicate(module, mesh=init_device_mesh("cpu", (2,)))


_fsdp1 = partial(FullyShardedDataParallel, device_id=torch.device("cpu"))
AROUND = {
    "DDP": DistributedDataParallel,
    "DataParallel": DataParallel,
    "FSDP1": _fsdp1,
    "fully_shard": _fully_shard,
}
ON_THE_MODEL = AROUND | {
    "fully_shard of two": _fully_shard_two,
    "replicate": _replicate,
    "replicate of FSDP2": _replicate_with_fsdp,
}


def _shards(model: nn.Module) -> list[Tensor]:
    return [group.master.flat.detach().clone() for _, group in named_groups(model)]


def _train(model: nn.Module, rank: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = _shards(model)
    for tokens in next(data(rank, 1, 1)):
        model(tokens).backward()
    optimizer.step()
    assert not any(map(torch.equal, _shards(model), before))


@pytest.mark.parametrize("engine", ON_THE_MODEL.values(), ids=ON_THE_MODEL)
@on_ranks(2)
def test_an_engine_around_the_model_is_refused_and_changes_nothing(rank: int, engine: Any) -> None:
    for model in (build(), auto_wrap(Net(), by_class(Block, nn.Linear))):
        before = _shards(model)
        with pytest.raises(ValueError, match=r"around a model that FlatFSDP has sharded.*Accelerator\.prep"):
            engine(model)
        assert same(_shards(model), before)
        _train(model, rank)


@pytest.mark.parametrize("engine", AROUND.values(), ids=AROUND)
@on_ranks(2)
def test_an_engine_around_something_that_contains_the_model_is_refused(rank: int, engine: Any) -> None:
    model = build()
    before = _shards(model)
    with pytest.raises(ValueError, match="around a model that FlatFSDP has sharded"):
        engine(Lightning(model))
    assert same(_shards(model), before)
    if engine is _fully_shard:
        # It raises at its end.
        with pytest.raises(RuntimeError, match="was replaced"):
            model(TOKENS)
    else:
        _train(model, rank)


@pytest.mark.parametrize("engine", [DistributedDataParallel, _fsdp1, _replicate, _fully_shard])
@on_ranks(2)
def test_an_engine_inside_is_refused(rank: int, engine: Callable[[nn.Module], Any]) -> None:
    net = Net()
    net.head = engine(net.head) or net.head
    with pytest.raises(ValueError, match=r"plain module|without parallelize_module or fully_shard"):
        shard(net)


@on_ranks(2)
def test_a_layer_of_a_sharded_model_that_fully_shard_has_got_raises(rank: int) -> None:
    model = build()
    fully_shard(model.blocks[0].up, mesh=init_device_mesh("cpu", (2,)))
    with pytest.raises(RuntimeError, match="was replaced"):
        model(TOKENS)


@on_ranks(2)
def test_parallelize_module_inside_a_sharded_model_raises(rank: int) -> None:
    """On every rank, before it sends a parameter: shards are of unequal sizes."""
    for model, name in ((build(), "blocks.1.up"), (flat(), "module.blocks.1.module.up")):
        with pytest.raises(ValueError, match="parallelize_module around a model that FlatFSDP has sharded"):
            parallelize_module(model, init_device_mesh("cpu", (2,)), {name: ColwiseParallel()})
        model(TOKENS).backward()


@on_ranks(2)
def test_another_model_may_have_another_engine(rank: int) -> None:
    """The other model, like a GAN's discriminator, is a submodule of the same whole."""
    generator = build()
    discriminator = DistributedDataParallel(Net())
    both = nn.ModuleDict({"generator": generator, "discriminator": discriminator})
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in both.values()]
    for tokens in next(data(rank, 1, 1)):
        (generator(tokens) + discriminator(tokens)).backward()
    for optimizer in optimizers:
        optimizer.step()


@on_ranks(2)
def test_functional_call_is_refused_with_other_shards_and_with_whole_parameters() -> None:
    model = build()
    for make, error in (
        (torch.zeros_like, r"parameter embedding\.weight was replaced after sharding"),
        (lambda view: torch.zeros(whole_shape(view)), "functional_call is not supported: call"),
    ):
        values = {name: make(view) for name, view in model.named_parameters()}
        with pytest.raises(RuntimeError, match=error):
            torch.func.functional_call(model, values, (TOKENS,))
        model(TOKENS).backward()


# ---- modules that come and go ----------------------------------------------------------------------------


class LoRA(nn.Module):
    """A layer with two small matrices beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def _lora(model: Any) -> None:
    model.blocks[1].up = LoRA(model.blocks[1].up)


def _new_layer(model: Any) -> None:
    model.blocks[0].gate = nn.Linear(2, 2)


def _by_add_module(model: Any) -> None:
    model.add_module("gate", nn.Linear(2, 2))


def _another_block(model: Any) -> None:
    model.blocks.append(Block())


def _resized(model: Any) -> None:
    model.embedding = nn.Embedding(50, 20)


def _without_head(model: Any) -> None:
    model.head = nn.Identity()


def _none(model: Any) -> None:
    model.head = None


def _fewer_blocks(model: Any) -> None:
    model.blocks = nn.ModuleList(list(model.blocks)[:2])


ADDED = r"brings parameter .* is built already.*Change the model"
REMOVED = "is replaced in a unit that is built already"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        *((change, ADDED) for change in (_lora, _new_layer, _by_add_module, _another_block, _resized)),
        *((change, REMOVED) for change in (_without_head, _none, _fewer_blocks)),
    ],
)
@on_ranks(2)
def test_parameters_neither_come_nor_go(rank: int, change: Callable[[Any], None], message: str) -> None:
    model = build()
    modules = dict(model.named_modules())
    with pytest.raises(TypeError, match=message):
        change(model)
    assert dict(model.named_modules()) == modules


class Loss(nn.Module):
    """A module without parameters."""

    def forward(self, x: Tensor) -> Tensor:
        return x


@pytest.mark.parametrize("flag", [True, False])
@on_ranks(2)
def test_modules_that_train_nothing_and_wrappers_may_come(rank: int, flag: bool) -> None:
    plain, model = (build(optimize_backward_concat=flag) for _ in range(2))
    model.loss = Loss()
    model.blocks[0].loss = Loss()
    model.teacher = Net().requires_grad_(False)
    model.blocks[0].up = nn.Sequential(model.blocks[0].up)
    model.blocks[2].up = torch.compile(model.blocks[2].up, backend="eager")
    apply_activation_checkpointing(model, check_fn=lambda module: module is model.blocks[1])
    for tokens in next(data(rank, 1, 2)):
        losses = [each(tokens) for each in (plain, model)]
        assert torch.equal(*losses)
        for loss in losses:
            loss.backward()
    assert same(grads_of(model), grads_of(plain))


@on_ranks(2)
def test_a_layer_of_a_unit_is_not_copied(rank: int) -> None:
    for model in (flat(), shard(Net())):
        with model.summon_full_params(), pytest.raises(TypeError, match="cannot be copied or pickled"):
            copy.deepcopy(model.head)


@on_ranks(2)
def test_plain_modules_around_units_may_change(rank: int) -> None:
    whole = nn.Module()
    whole.net = shard(Net())
    whole.value_head = nn.Linear(2, 2)
    whole.net = shard(Net())
    whole.net = nn.Identity()
