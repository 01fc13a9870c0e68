"""FlattenParamsWrapper: what it flattens, and that it computes and trains like the plain module."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from flatfsdp.flat.binding import Binding
from flatfsdp.flat.flatten_params import FlattenParamsWrapper
from tests.support.assertions import assert_raises
from tests.support.flatten_models import (
    MODELS,
    all_in_one,
    assert_same_state,
    build,
    tokens,
    train,
    two_groups,
    wrap_all,
)

# ---- construction ---------------------------------------------------------------------------------------


def test_default_is_one_flat_parameter_of_everything():
    plain, wrapper = build(), wrap_all()
    flat = wrapper.flat_param
    assert isinstance(flat, nn.Parameter)
    assert [name for name, _ in wrapper.named_parameters()] == ["flat_param_0"]
    assert flat.dim() == 1
    assert flat.numel() % 16 == 0
    assert wrapper.num_params_managed == len(list(plain.parameters()))
    layout = wrapper.bindings[0].layout
    assert flat.numel() == layout.padded_numel(1)
    for start, stop in layout.gaps(1):
        assert flat[start:stop].eq(0).all()
    for slot, parameter in zip(layout.slots, plain.parameters(), strict=True):
        assert torch.equal(flat[slot.offset : slot.end].view(slot.shape), parameter)


def test_a_list_is_one_group_and_the_rest_stays():
    model = build()
    wrapper = FlattenParamsWrapper(model, iter([model.mlp[0].weight, model.unused]))
    assert wrapper.metadata(0).param_names == ("mlp.0.weight", "unused")
    assert {name for name, _ in wrapper.named_parameters()} == {
        "flat_param_0",
        "module.embedding.weight",
        "module.norm.weight",
        "module.norm.bias",
        "module.mlp.0.bias",
        "module.mlp.2.weight",
        "module.head.bias",
    }


def test_lists_are_several_groups_with_their_own_names_dtypes_and_requires_grad():
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4).double(), nn.Linear(4, 5).requires_grad_(False))
    wrapper = FlattenParamsWrapper(model, [list(m.parameters()) for m in model], ["a", "b", "frozen"])
    assert [name for name, _ in wrapper.named_parameters()] == ["a", "b", "frozen"]
    assert [p.dtype for p in wrapper.flat_params] == [torch.float32, torch.float64, torch.float32]
    assert [p.requires_grad for p in wrapper.flat_params] == [True, True, False]
    assert not model[2].weight.requires_grad
    assert wrapper.num_params_managed == 6


@pytest.mark.parametrize("module", [nn.Linear(2, 3), nn.ReLU()])
def test_an_empty_list_or_no_parameters_flattens_nothing(module):
    names = [name for name, _ in module.named_parameters()]
    wrapper = FlattenParamsWrapper(module, [] if names else None)
    assert wrapper.flat_params == []
    assert wrapper.num_params_managed == 0
    assert not wrapper.is_flattened
    assert [name for name, _ in wrapper.named_parameters()] == [f"module.{name}" for name in names]
    assert list(wrapper.state_dict()) == names
    wrapper.load_state_dict(module.state_dict())
    assert torch.equal(wrapper(torch.ones(1, 2)), module(torch.ones(1, 2)))
    with wrapper.unflatten_params():
        assert [name for name, _ in module.named_parameters()] == names


def test_metadata_describes_slots_and_shared_names():
    metadata = wrap_all().metadata(0)
    names, shapes, numels, shared = metadata
    assert names[0] == "unused"
    assert names[1] == "embedding.weight"
    assert shapes[1] == (11, 6)
    assert numels[1] == 66
    assert shared[1] == ("head.weight",)
    assert len(names) == len(shapes) == len(numels) == len(shared) == 8
    with pytest.raises(IndexError):
        wrap_all().metadata(1)


def test_a_tied_parameter_of_which_one_place_is_listed_is_replaced_everywhere():
    model = build()
    wrapper = FlattenParamsWrapper(model, [model.head.weight])
    assert wrapper.metadata(0).param_names == ("embedding.weight",)
    assert model.head.weight is model.embedding.weight
    assert "module.embedding.weight" not in dict(wrapper.named_parameters())
    wrapper(tokens()).sum().backward()
    assert wrapper.flat_param.grad[:66].abs().sum() > 0


def test_module_attributes_work_between_construction_and_forward_and_after_a_step():
    """Also after the optimizer wrote to the flat parameter, when views from a split could not be printed."""
    wrapper = wrap_all()
    weight = build().mlp[0].weight
    assert torch.equal(wrapper.module.mlp[0].weight, weight)
    wrapper.module.mlp[0].weight.sum().backward()
    assert wrapper.flat_param.grad.sum() == weight.numel()
    train(wrapper, torch.optim.SGD(wrapper.parameters(), lr=0.1), steps=1)
    assert "grad_fn" in repr(wrapper.module.mlp[0].weight)
    assert torch.equal(wrapper.module.mlp[0].weight, wrapper.state_dict()["mlp.0.weight"])
    assert not torch.equal(wrapper.module.mlp[0].weight, weight)
    wrapper.zero_grad()
    wrapper.module.mlp[0].weight.sum().backward()
    assert wrapper.flat_param.grad.sum() == weight.numel()


def test_zero_sized_and_zero_dimensional_parameters():
    model = nn.Module()
    model.scale = nn.Parameter(torch.tensor(2.0))
    model.nothing = nn.Parameter(torch.empty(0, 3))
    wrapper = FlattenParamsWrapper(model)
    assert model.scale.shape == ()
    assert model.nothing.shape == (0, 3)
    wrapper.load_state_dict({"scale": torch.tensor(3.0), "nothing": torch.empty(0, 3)})
    assert model.scale == 3


# ---- errors: the parameter is named, and the module is left as it was -----------------------------------


def check_refused(model, error, message, *options):
    before = list(model.named_parameters())
    assert_raises(error, message, FlattenParamsWrapper, model, *options)
    assert list(model.named_parameters()) == before


@pytest.mark.parametrize(
    ("change", "trait"),
    [
        (lambda layer: layer.double(), "dtype"),
        (lambda layer: layer.weight.requires_grad_(False), "requires_grad"),
        (lambda layer: layer.to("meta"), "device"),
    ],
)
def test_a_group_must_agree(change, trait):
    model = build()
    change(model.mlp[2])
    check_refused(model, ValueError, rf"mlp\.2\.weight has {trait} .*unused in the same group")


TIED = r"parameter head\.weight is in groups 0 and 1"


@pytest.mark.parametrize(
    ("make_list", "error", "message"),
    [
        (lambda m: [[m.embedding.weight], [m.head.bias, m.head.weight]], ValueError, TIED),
        (lambda m: [torch.zeros(3)], TypeError, "group 0 of param_list contains a <class 'torch.Tensor'>"),
        (lambda m: [[m.unused], ["unused"]], TypeError, "group 1 of param_list contains a <class 'str'>"),
        (lambda m: [m.unused, [m.head.bias]], TypeError, "contains a <class 'list'>"),
        (lambda m: [[m.unused], []], ValueError, "group 1 of param_list is empty"),
        (lambda m: [[m.unused], [nn.Parameter(torch.zeros(4, 5))]], ValueError, r"\(4, 5\) is not"),
    ],
)
def test_bad_param_lists(make_list, error, message):
    model = build()
    check_refused(model, error, message, make_list(model))


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["a"], "1 flat_param_names for 2 groups"),
        (["a", "b", "c"], "3 flat_param_names for 2 groups"),
        (["a", "a"], "'a' is taken"),
        (["a", "b.c"], "'b.c', which is not an attribute name"),
        (["a", ""], "'', which is not an attribute name"),
        (["a", "module"], "'module' is taken"),
        (["a", "forward"], "'forward' is taken"),
        (["a", "unused"], "'unused' is taken"),
    ],
)
def test_bad_names(names, message):
    model = build()
    check_refused(model, ValueError, message, two_groups(model), names)


def test_flat_param_with_several_groups_says_how_many():
    """A property's AttributeError must not turn into one about the wrapped module."""
    with pytest.raises(AttributeError, match="there are 2 flat parameters; use flat_params"):
        wrap_all(groups=two_groups).flat_param  # noqa: B018
    with pytest.raises(AttributeError, match="'TiedLM' object has no attribute 'nonsense'"):
        wrap_all().nonsense  # noqa: B018


def test_sparse_gradients_are_refused_by_name():
    wrapper = FlattenParamsWrapper(nn.Sequential(nn.Embedding(5, 2, sparse=True)))
    with pytest.raises(TypeError, match=r"0\.weight got a torch\.sparse_coo gradient"):
        wrapper(torch.tensor([1])).sum().backward()


def test_a_write_between_forward_and_backward_is_noticed():
    """A gradient with respect to changed weights would be silently wrong."""
    wrapper = FlattenParamsWrapper(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    loss = wrapper(torch.ones(1, 2)).sum()
    with torch.no_grad():
        wrapper.flat_param.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# ---- training -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("factory", MODELS)
@pytest.mark.parametrize("groups", [all_in_one, two_groups])
@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        (torch.optim.Adam, {"lr": 0.01, "foreach": False}),
    ],
)
def test_training_is_bit_equal_to_the_plain_module(factory, groups, optimizer, options):
    plain, wrapper = build(factory), wrap_all(factory, groups)
    expected = train(plain, optimizer(plain.parameters(), **options))
    actual = train(wrapper, optimizer(wrapper.parameters(), **options))
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    assert_same_state(wrapper.state_dict(), plain.state_dict())


def test_forward_without_gradients_and_then_with():
    wrapper, plain = wrap_all().eval(), build().eval()
    with torch.no_grad():
        output = wrapper(tokens())
    assert not output.requires_grad
    assert torch.equal(output, plain(tokens()))
    with torch.inference_mode():
        assert torch.equal(wrapper(tokens()), output)
    assert wrapper.module.head.weight.requires_grad
    wrapper(tokens()).sum().backward()
    assert wrapper.flat_param.grad.abs().sum() > 0


def test_forward_computes_with_the_flat_parameter_as_it_is_now():
    """Replaced for one call, frozen, or with other storage."""
    wrapper, other = wrap_all().eval(), wrap_all(seed=5).eval()
    tensor = other.flat_param.detach().clone().requires_grad_()
    output = torch.func.functional_call(wrapper, {"flat_param_0": tensor}, (tokens(),))
    assert torch.equal(output, other(tokens()))
    output.sum().backward()
    assert tensor.grad.abs().sum() > 0
    assert wrapper.flat_param.grad is None
    assert torch.equal(wrapper(tokens()), build().eval()(tokens()))
    wrapper.flat_param.requires_grad_(False)
    assert not wrapper(tokens()).requires_grad
    wrapper.flat_param.data = tensor.detach()
    assert torch.equal(wrapper(tokens()), other(tokens()))


def test_forward_computes_with_what_another_engine_put_in_place_of_the_flat_parameter():
    """Flat parameters get sharded by taking them out of the wrapper; it must not go on with its old views."""
    wrapper, other = wrap_all().eval(), wrap_all(seed=5).eval()
    tensor = other.flat_param.detach().clone().requires_grad_()
    Binding.of(nn.Sequential(wrapper), [wrapper.flat_param]).bind([tensor])
    assert list(wrapper.parameters()) == []
    output = wrapper(tokens())
    assert torch.equal(output, other(tokens()))
    output.sum().backward()
    assert tensor.grad.abs().sum() > 0


def test_frozen_groups_get_no_gradient():
    model = build()
    model.mlp.requires_grad_(False)
    wrapper = FlattenParamsWrapper(model, [list(model.mlp.parameters()), [model.head.bias]])
    before = wrapper.flat_params[0].clone()
    optimizer = torch.optim.SGD([p for p in wrapper.parameters() if p.requires_grad], lr=0.1)
    train(wrapper, optimizer)
    assert wrapper.flat_params[0].grad is None
    assert torch.equal(wrapper.flat_params[0], before)


def test_second_derivatives():
    plain, wrapper = build(), wrap_all()
    for model in (plain, wrapper):
        loss = model(tokens()).square().mean()
        grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True, allow_unused=True)
        sum(grad.square().sum() for grad in grads if grad is not None).backward()
    index = wrapper.metadata(0).param_names.index("mlp.0.weight")
    actual = wrapper.get_param_views([wrapper.flat_param.grad])[index]
    assert torch.allclose(actual, plain.mlp[0].weight.grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("factory", MODELS)
def test_conversion_moves_flat_parameters_and_views_together(factory):
    wrapper, plain = wrap_all(factory), build(factory)
    wrapper.double()
    plain.double()
    assert wrapper.flat_param.dtype == torch.float64
    assert wrapper.module.head.weight.dtype == torch.float64
    assert wrapper.module.head.weight.data_ptr() != 0
    assert torch.equal(wrapper(tokens()), plain(tokens()))
    assert_same_state(wrapper.state_dict(), plain.state_dict())
