"""FlattenParamsWrapper: its parameters seen as ordinary ones, and copies of it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from flatfsdp.flat.flatten_params import FlattenParamsWrapper
from tests.support.copies import by_pickle, by_torch_save
from tests.support.flatten_models import (
    MODELS,
    all_in_one,
    assert_same_state,
    build,
    nest,
    snapshot,
    tokens,
    train,
    two_groups,
    wrap_all,
)

# ---- views ----------------------------------------------------------------------------------------------


def test_param_views_of_external_tensors():
    wrapper = wrap_all(groups=two_groups)
    names = [name for i in range(2) for name in wrapper.metadata(i).param_names]
    own = dict(zip(names, wrapper.get_param_views(), strict=True))
    assert all(torch.equal(view, wrapper.state_dict()[name]) for name, view in own.items())
    external = [torch.zeros(p.numel(), dtype=torch.bfloat16, requires_grad=True) for p in wrapper.flat_params]
    views = wrapper.get_param_views(external)
    assert [view.shape for view in views] == [view.shape for view in own.values()]
    sum(view.sum() for view in views).backward()
    for tensor, binding in zip(external, wrapper.bindings, strict=True):
        assert tensor.grad.sum() == sum(slot.numel for slot in binding.layout.slots)
    with pytest.raises(ValueError, match="this wrapper needs"):
        wrapper.get_param_views(external[:1])
    with pytest.raises(ValueError, match="this wrapper needs"):
        wrapper.get_param_views([tensor[1:] for tensor in external])


@pytest.mark.parametrize("factory", MODELS)
@pytest.mark.parametrize("groups", [all_in_one, two_groups])
def test_inside_unflatten_params_the_module_is_the_plain_one(factory, groups):
    plain, wrapper = build(factory), wrap_all(factory, groups)
    with wrapper.unflatten_params():
        assert not wrapper.is_flattened
        parameters = dict(wrapper.module.named_parameters())
        assert list(parameters) == list(dict(plain.named_parameters()))
        assert all(isinstance(p, nn.Parameter) and p.requires_grad and p.is_leaf for p in parameters.values())
        assert [name for name, _ in wrapper.named_parameters()] == [f"module.{name}" for name in parameters]
        assert torch.equal(wrapper(tokens()), plain(tokens()))
        assert_same_state(wrapper.state_dict(), plain.state_dict())
    assert wrapper.is_flattened
    assert list(wrapper.module.parameters()) == []
    assert torch.equal(wrapper(tokens()), plain(tokens()))


def test_writes_inside_unflatten_params_stay():
    wrapper = wrap_all()
    with wrapper.unflatten_params():
        nn.init.constant_(wrapper.module.head.bias, 3.0)
        with wrapper.unflatten_params():  # nests
            nn.init.constant_(wrapper.module.unused, 4.0)
        assert not wrapper.is_flattened
    state = wrapper.state_dict()
    assert state["head.bias"].eq(3).all()
    assert state["unused"].eq(4).all()
    assert wrapper.module.head.bias.eq(3).all()


def test_replaced_parameters_are_copied_back():
    wrapper = wrap_all()
    before = snapshot(wrapper)
    with wrapper.unflatten_params():
        model = wrapper.module
        model.unused = nn.Parameter(torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64))  # another dtype
        model.head.bias.data = torch.ones(11)  # the same object, other storage
        model.head.weight = nn.Parameter(torch.full((11, 6), 5.0))  # one of two tied places
        norm = model.norm
        norm.weight, norm.bias = norm.bias, norm.weight  # both alias the flat parameter
    expected = {
        **before,
        "unused": torch.tensor([1.0, 2.0, 3.0]),
        "head.bias": torch.ones(11),
        "head.weight": torch.full((11, 6), 5.0),
        "embedding.weight": torch.full((11, 6), 5.0),
        "norm.weight": before["norm.bias"],
        "norm.bias": before["norm.weight"],
    }
    assert_same_state(wrapper.state_dict(), expected)
    assert wrapper.flat_param.dtype == torch.float32
    assert wrapper.module.head.weight is wrapper.module.embedding.weight


def run_inside(wrapper, *actions):
    with wrapper.unflatten_params():
        for action in actions:
            action(wrapper.module)


def raise_key_error(model):
    raise KeyError("mine")


def replace_mlp_bias(model):
    model.mlp[0].bias = nn.Parameter(torch.ones(9))


def replace_with_wrong_shape(model):
    model.unused = nn.Parameter(torch.zeros(4))


def remove(model):
    del model.head.bias


def untie(model):
    model.head.weight = nn.Parameter(torch.zeros(11, 6))
    model.embedding.weight = nn.Parameter(torch.ones(11, 6))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (replace_with_wrong_shape, r"unused was given shape \(4,\) .* has shape \(3,\)"),
        (remove, r"head\.bias was removed"),
        (untie, r"embedding\.weight, head\.weight are tied"),
    ],
)
def test_what_cannot_be_copied_back_is_an_error_and_changes_nothing(change, message):
    wrapper = wrap_all()
    before = snapshot(wrapper)
    with pytest.raises(ValueError, match=message):
        run_inside(wrapper, replace_mlp_bias, change)
    assert wrapper.is_flattened
    assert_same_state(wrapper.state_dict(), before)


def test_an_exception_inside_unflatten_params_restores_the_flattened_state():
    wrapper, plain = wrap_all(groups=two_groups), build()
    with pytest.raises(KeyError, match="mine"):
        run_inside(wrapper, replace_with_wrong_shape, raise_key_error)
    assert wrapper.is_flattened
    assert [name for name, _ in wrapper.named_parameters()] == ["flat_param_0", "flat_param_1"]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (wrapper, plain)]
    assert torch.equal(train(wrapper, optimizers[0])[-1], train(plain, optimizers[1])[-1])


@pytest.mark.parametrize("factory", MODELS)
def test_external_tensors_inside_unflatten_params_are_used_and_own_data_stays(factory):
    wrapper, other = wrap_all(factory), wrap_all(factory, seed=5)
    before = snapshot(wrapper)
    external = [flat.detach().clone() for flat in other.flat_params]
    with wrapper.unflatten_params(external):
        assert_same_state(wrapper.state_dict(), other.state_dict())
        assert torch.equal(wrapper.eval()(tokens()), other.eval()(tokens()))
        with torch.no_grad():
            wrapper.module.head.bias.fill_(9.0)
        with pytest.raises(RuntimeError, match="inside another unflatten_params"):
            with wrapper.unflatten_params(external):
                pass
    assert wrapper.get_param_views(external)[-1].eq(9).all()
    assert_same_state(wrapper.state_dict(), before)
    with pytest.raises(ValueError, match="this wrapper needs"):
        with wrapper.unflatten_params([external[0][:-1]]):
            pass
    assert wrapper.is_flattened


# ---- copies ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("factory", MODELS)
@pytest.mark.parametrize("groups", [all_in_one, two_groups])
@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("duplicate", [copy.deepcopy, by_pickle, by_torch_save])
def test_copies_continue_bit_equal_and_are_independent(factory, groups, steps, duplicate):
    wrapper = wrap_all(factory, groups)
    wrapper.note = "kept"
    train(wrapper, torch.optim.SGD(wrapper.parameters(), lr=0.1), steps=steps)
    before = snapshot(wrapper)
    copied = duplicate(wrapper)
    assert type(copied) is FlattenParamsWrapper
    assert copied.note == "kept"
    names = [name for name, _ in wrapper.named_parameters()]
    assert [name for name, _ in copied.named_parameters()] == names
    assert [copied.metadata(i) for i in range(len(names))] == [wrapper.metadata(i) for i in range(len(names))]
    assert_same_state(copied.state_dict(), before)
    losses = train(copied, torch.optim.SGD(copied.parameters(), lr=0.1))
    assert_same_state(wrapper.state_dict(), before)
    expected = train(wrapper, torch.optim.SGD(wrapper.parameters(), lr=0.1))
    assert all(torch.equal(a, b) for a, b in zip(losses, expected, strict=True))
    assert_same_state(copied.state_dict(), wrapper.state_dict())


@pytest.mark.parametrize("duplicate", [copy.deepcopy, by_pickle])
def test_nested_wrappers_can_be_copied(duplicate):
    nested = nest(build())
    copied = duplicate(nested)
    assert_same_state(copied.state_dict(), nested.state_dict())
    assert [name for name, _ in copied.named_parameters()] == [name for name, _ in nested.named_parameters()]
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
    assert copied.state_dict()["0.0.mlp.0.weight"].eq(0).all()
    assert nested.state_dict()["0.0.mlp.0.weight"].ne(0).any()


def test_deepcopy_keeps_what_wrapped_modules_share_with_others():
    """One memo for the whole tree: a submodule that is also used outside stays one object in the copy."""
    model = nn.Module()
    model.wrapped = FlattenParamsWrapper(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    model.activation = model.wrapped[1]
    copied = copy.deepcopy(model)
    assert copied.activation is copied.wrapped[1]
    assert copied.activation is not model.activation


@pytest.mark.parametrize("duplicate", [copy.deepcopy, by_pickle])
def test_a_module_that_knows_its_wrapper_knows_the_copy_afterwards(duplicate):
    wrapper = wrap_all()
    wrapper.module.owners = [wrapper]
    copied = duplicate(wrapper)
    assert copied.module.owners[0] is copied
    assert_same_state(copied.state_dict(), wrapper.state_dict())


def test_copies_keep_mode_names_frozen_state_and_hooks():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False)).eval()
    wrapper = FlattenParamsWrapper(model, [list(m.parameters()) for m in model], ["a", "b"]).eval()
    wrapper.register_forward_hook(double_output)
    for copied in (copy.deepcopy(wrapper), by_pickle(wrapper)):
        assert not copied.training
        assert [(name, p.requires_grad) for name, p in copied.named_parameters()] == [
            ("a", True),
            ("b", False),
        ]
        assert torch.equal(copied(torch.ones(1, 2)), wrapper(torch.ones(1, 2)))
        assert torch.equal(copied(torch.ones(1, 2)), 2 * model(torch.ones(1, 2)))


def double_output(module, args, output):
    return 2 * output
