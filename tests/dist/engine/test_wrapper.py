"""`FlatFSDP` and `auto_wrap`: a module around a sharded one adds no name and no bit, and hides no check."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

from flatfsdp import Debug, FlatFSDP, Precision, auto_wrap, by_class, checkpoint, param_groups, shard
from flatfsdp.contract.transparent import unwrapped
from flatfsdp.engine.whole.units import units_in
from tests.support import stored_weights
from tests.support.checkpoints import equal
from tests.support.fp8_layers import Block as FP8Block
from tests.support.fp8_layers import seeded
from tests.support.meshes import REPLICATED, placed
from tests.support.models import Block, Net, plain_net, train_for_losses
from tests.support.ranks import on_ranks

POLICY = by_class(Block, nn.Linear)
"""Picks blocks and the layers inside, so that wrappers are nested."""

TOKENS = torch.arange(12).view(2, 6)


class Counting(Net):
    """A model with a buffer, and a tied layer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.last = self.head


# ---- names ----------------------------------------------------------------------------------------------


def test_names_and_their_order_are_the_plain_models() -> None:
    plain, model = plain_net(Counting), auto_wrap(plain_net(Counting), POLICY)
    assert isinstance(model.blocks[0].up, FlatFSDP) and model.last is model.head
    for around in (lambda each: each, lambda each: nn.ModuleDict({"model": each})):
        ours, theirs = around(model), around(plain)
        for kind in ("named_parameters", "named_buffers"):
            for options in ({}, {"prefix": "a"}, {"remove_duplicate": False}):
                names = [[name for name, _ in getattr(each, kind)(**options)] for each in (ours, theirs)]
                assert names[0] == names[1], (kind, options)
        assert list(ours.state_dict()) == list(theirs.state_dict())
        assert list(ours.state_dict(prefix="a.")) == list(theirs.state_dict(prefix="a."))
    for options in ({}, {"prefix": "a"}, {"remove_duplicate": False}):
        names = [name for name, _ in model.named_modules(**options)]
        # A wrapper has the name of the module inside, and comes before it.
        assert list(dict.fromkeys(names)) == [name for name, _ in plain.named_modules(**options)]
        assert names[:2] == [options.get("prefix", "")] * 2
    walked = [
        [f"{path}.{name}".lstrip(".") for path, each in whole.named_modules() for name in each._parameters]
        for whole in (model, plain)
    ]
    assert walked[0] == walked[1]
    assert dict(model.named_modules())["blocks.0"] is model.blocks[0].module
    assert model.get_submodule("blocks.0.up") is model.blocks[0].up


@on_ranks(2)
def test_loading_reports_plain_names() -> None:
    model, plain = auto_wrap(plain_net(), POLICY), plain_net()
    around, state = nn.ModuleDict({"model": model}), plain.state_dict()
    assert not any(model.load_state_dict({name: value + 1 for name, value in state.items()}))
    assert equal(model.state_dict(), {name: value + 1 for name, value in state.items()})
    del state["blocks.1.up.bias"], state["head.weight"]
    state["blocks.0.extra"] = state["module.blocks.0.up.weight"] = torch.zeros(2)
    for ours, theirs, prefix in ((model, plain, ""), (around, nn.ModuleDict({"model": plain}), "model.")):
        broken = {prefix + name: value for name, value in state.items()}
        found, expected = (each.load_state_dict(broken, strict=False) for each in (ours, theirs))
        assert found.missing_keys == expected.missing_keys
        assert sorted(found.unexpected_keys) == sorted(expected.unexpected_keys)
        with pytest.raises(RuntimeError) as error:
            ours.load_state_dict({**broken, f"{prefix}head.bias": torch.zeros(3)})
        missing = f'Missing key(s) in state_dict: "{prefix}blocks.1.up.bias", "{prefix}head.weight"'
        for words in (missing, f'"{prefix}blocks.0.extra"', f"size mismatch for {prefix}head.bias"):
            assert words in str(error.value)


@pytest.mark.parametrize("make", [auto_wrap, shard])
@on_ranks(2)
def test_checkpoint_wrappers_of_pytorch_add_no_name_either(rank: int, make: Any) -> None:
    """Around units, and around modules inside, which are wrapped before."""
    plain, net = plain_net(), plain_net()
    apply_activation_checkpointing(net, check_fn=lambda each: each is net.head)
    model = make(net, by_class(Block))
    apply_activation_checkpointing(model, check_fn=lambda each: isinstance(each, Block))
    assert equal(checkpoint.full_state_dict(model), plain.state_dict())
    checkpoint.load_full_state_dict(model, {name: value + 1 for name, value in plain.state_dict().items()})
    assert equal(model.state_dict(), {name: value + 1 for name, value in plain.state_dict().items()})
    named, rest = param_groups(model, [{"params": ["head.weight", "blocks.0.up.weight"]}])
    assert len(named["params"]) == 2 and len(rest["params"]) == len(list(plain.parameters())) - 2
    for index, block in enumerate(model.blocks):
        assert unwrapped(block).fsdp_state.prefix == f"blocks.{index}."
    train_for_losses(model, rank)


# ---- bits -----------------------------------------------------------------------------------------------

WAYS: list[dict[str, Any]] = [
    {},
    {"optimize_backward_concat": False, "reshard_after_forward": False},
    {"precision": Precision(compute=torch.bfloat16), **REPLICATED},
    {"grad_sync": "every", "debug": Debug(poison_on_free=True)},
]


@pytest.mark.parametrize("nested", [True, False], ids=["nested", "one unit"])
@pytest.mark.parametrize("options", WAYS, ids=str)
@on_ranks(1, 2)
def test_the_bits_are_those_of_shard(rank: int, options: dict[str, Any], nested: bool) -> None:
    options = placed(options)
    ours = auto_wrap(plain_net(), POLICY, **options) if nested else FlatFSDP(plain_net(), **options)
    theirs = shard(plain_net(), POLICY if nested else None, **options)
    assert all(map(torch.equal, train_for_losses(ours, rank), train_for_losses(theirs, rank)))
    assert equal(dict(ours.named_parameters()), dict(theirs.named_parameters()))
    assert equal(ours.state_dict(), theirs.state_dict())


@on_ranks(2)
def test_the_bits_are_those_of_shard_with_weights_that_are_stored_in_fp8(rank: int) -> None:
    precision = Precision(fp8_weights=stored_weights.RECIPE)
    ours, theirs = (
        make(seeded(stored_weights.Net), by_class(FP8Block), precision=precision)
        for make in (auto_wrap, shard)
    )
    assert all(map(torch.equal, *(stored_weights.train(each, rank) for each in (ours, theirs))))
    assert equal(dict(ours.state_dict()), dict(theirs.state_dict()))


@on_ranks(2)
def test_the_module_inside_is_the_same_model(rank: int) -> None:
    model, plain = auto_wrap(plain_net(), POLICY), plain_net()
    assert unwrapped(model) is model.module and isinstance(model.module, Net)
    assert unwrapped(nn.ModuleDict({"model": model}))["model"] is model
    assert unwrapped(None) is None
    for each in (model, model.module):
        assert torch.equal(each(TOKENS), plain(TOKENS))
        assert torch.equal(each.logits(TOKENS), plain.logits(TOKENS))
        assert equal(each.state_dict(), plain.state_dict())
        assert equal(checkpoint.full_state_dict(each), plain.state_dict())
        (group,) = param_groups(each, [])
        assert all(a is b for a, b in zip(group["params"], model.parameters(), strict=True))
    assert model.fsdp_state is model.module.fsdp_state
    assert model.fsdp_state.shared is model.blocks[0].fsdp_state.shared
    assert str(model.memory_report()) == str(model.module.memory_report())
    assert [prefix for prefix, _ in units_in(model)] == [prefix for prefix, _ in units_in(model.module)]


# ---- methods of nn.Module -------------------------------------------------------------------------------


@on_ranks(2)
def test_methods_reach_the_modules_inside() -> None:
    model, names = auto_wrap(plain_net(), POLICY), []
    assert model.eval() is model and not any(each.training for each in model.modules())
    assert model.train() is model and all(each.training for each in model.modules())

    def initialise(module: nn.Module) -> None:
        names.append(type(module).__name__)
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 0.5)
            nn.init.zeros_(module.bias)

    assert model.apply(initialise) is model
    state = model.state_dict()
    for name in ("head", "blocks.0.up", "blocks.2.down"):
        assert (state[f"{name}.weight"] == 0.5).all()
        assert not state[f"{name}.bias"].any()
    # Every module, and every wrapper, once.
    assert sorted(names) == sorted(type(each).__name__ for each in model.modules())
    assert model.requires_grad_(False) is model
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert not model(TOKENS).requires_grad
    assert model.to("cpu") is model and model.float() is model
    before = dict(model.state_dict())
    for refused in (model.double, lambda: model.to(torch.bfloat16), lambda: model.blocks[0].half()):
        with pytest.raises(TypeError, match=r"cannot be moved or converted.*pass device= and precision="):
            refused()
    for unit in (model, model.blocks[0]):
        with pytest.raises(TypeError, match=r"Delete to_empty\(\)"):
            unit.to_empty(device="cpu")
        with pytest.raises(TypeError, match="cannot be copied or pickled"):
            copy.deepcopy(unit)
        with pytest.raises(TypeError, match="cannot be copied or pickled"):
            pickle.dumps(unit)
    assert equal(dict(model.state_dict()), before)


# ---- what would break it --------------------------------------------------------------------------------


def test_modules_and_parameters_inside_are_not_replaced() -> None:
    model = auto_wrap(plain_net(), POLICY)
    with pytest.raises(TypeError, match="head cannot be replaced after wrapping"):
        model.head = nn.Linear(20, 30)
    for unit, name in ((model.blocks[0], "up"), (model.module, "head"), (model, "extra")):
        inside = unwrapped(unit)
        with pytest.raises(TypeError, match=r"cannot be replaced after wrapping|brings parameter"):
            setattr(inside if name == "extra" else unit, name, nn.Linear(20, 60))
    assert model(TOKENS).isfinite()
    for _ in range(2):
        model.average = latest = nn.Linear(2, 2)
    assert model.average is latest


def test_what_is_wrapped_is_not_wrapped_or_sharded_again() -> None:
    model = auto_wrap(plain_net(), POLICY)
    for each in (model, model.module, model.blocks[0], shard(plain_net(), POLICY)):
        for make in (shard, FlatFSDP):
            with pytest.raises(ValueError, match=r"sharded already|keeps its parameters already"):
                make(each)
