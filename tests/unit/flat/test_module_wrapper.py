"""ModuleWrapper, through FlattenParamsWrapper: attributes and state dicts as if there were no wrapper."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from torch import nn

from flatfsdp.flat.flatten_params import FlattenParamsWrapper
from tests.support.flatten_models import (
    MODELS,
    all_in_one,
    assert_same_state,
    build,
    nest,
    tokens,
    train,
    two_groups,
    wrap_all,
)

# ---- forwarding -----------------------------------------------------------------------------------------


def test_attributes_and_indexing_reach_the_wrapped_module():
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
    model.note = "hello"
    wrapper = FlattenParamsWrapper(FlattenParamsWrapper(model))
    assert wrapper.note == "hello"
    assert wrapper[1] is model[1]
    assert len(wrapper) == 2
    assert list(wrapper) == list(model)
    assert wrapper.module.module is model
    assert not hasattr(wrapper, "nonsense")


def test_a_wrapper_is_true_also_if_the_module_has_no_length():
    assert FlattenParamsWrapper(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="has no len"):
        len(FlattenParamsWrapper(nn.Linear(2, 2)))


# ---- state dicts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("factory", MODELS)
@pytest.mark.parametrize("groups", [all_in_one, two_groups, lambda model: list(model.parameters())[1:3]])
def test_state_dict_is_that_of_the_plain_module(factory, groups):
    plain, wrapper = build(factory), wrap_all(factory, groups)
    assert_same_state(wrapper.state_dict(), plain.state_dict())
    assert wrapper.state_dict()._metadata == plain.state_dict()._metadata
    assert wrapper.is_flattened


def test_state_dict_honours_destination_prefix_and_keep_vars():
    wrapper = wrap_all()
    destination = OrderedDict(kept=1)
    result = wrapper.state_dict(destination=destination, prefix="p.", keep_vars=True)
    assert result is destination
    assert list(result) == ["kept", *(f"p.{key}" for key in build().state_dict())]
    assert isinstance(result["p.head.bias"], nn.Parameter)
    assert not wrapper.state_dict()["head.bias"].requires_grad


def test_state_dict_aliases_the_flat_parameter_as_in_any_module():
    wrapper = wrap_all()
    wrapper.state_dict()["unused"].fill_(7.0)
    assert wrapper.module.unused.eq(7).all()


def test_nested_wrappers_save_load_and_train_like_the_plain_module():
    plain, nested = nn.Sequential(nn.Sequential(build())), nest(build())
    assert_same_state(nested.state_dict(), plain.state_dict())
    assert len(list(nested.parameters())) == 4
    losses = [train(model, torch.optim.Adam(model.parameters(), foreach=False)) for model in (plain, nested)]
    assert torch.equal(losses[0][-1], losses[1][-1])
    assert_same_state(nested.state_dict(), plain.state_dict())
    other = nn.Sequential(nn.Sequential(build(seed=9)))
    result = nested.load_state_dict(other.state_dict())
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    assert_same_state(nested.state_dict(), other.state_dict())
    plain.load_state_dict(nested.state_dict())


def test_flat_parameters_are_not_flattened_again():
    model = nest(build())
    inner = model[0][0].module.mlp
    names = model[0][0].metadata(0).param_names
    assert "mlp.0.weight" not in names
    assert not any("flat_param" in name for name in names)
    # The outermost wrapper of the two took what the innermost had left, under its state-dict name.
    assert inner.metadata(0).param_names == ("0.bias",)
    wrapped = FlattenParamsWrapper(nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"0\.flat_param_0 is flat already, in an inner wrapper"):
        FlattenParamsWrapper(nn.Sequential(wrapped), [wrapped.flat_param])


@pytest.mark.parametrize("groups", [all_in_one, two_groups, lambda model: [model.unused, model.head.weight]])
def test_load_state_dict_accepts_the_plain_and_the_flat_form(groups):
    source = wrap_all(groups=groups, seed=3)
    train(source, torch.optim.SGD(source.parameters(), lr=0.1), steps=1)  # moves the buffers, too
    for state in (source.state_dict(), source.flat_state_dict()):
        wrapper = wrap_all(groups=groups)
        keys = list(state)
        result = wrapper.load_state_dict(state)
        assert (result.missing_keys, result.unexpected_keys) == ([], [])
        assert list(state) == keys, "the caller's dict must not change"
        assert_same_state(wrapper.state_dict(), source.state_dict())
        assert torch.equal(wrapper.eval()(tokens()), source.eval()(tokens()))
        for flat, binding in zip(wrapper.flat_params, wrapper.bindings, strict=True):
            assert all(flat[start:stop].eq(0).all() for start, stop in binding.layout.gaps(1))


def test_flat_state_dict_has_flat_parameters_and_the_rest():
    model = build()
    wrapper = FlattenParamsWrapper(
        model, [list(model.mlp.parameters()), [model.head.weight]], ["mlp_flat", "tied"]
    )
    state = wrapper.flat_state_dict()
    assert set(state) == {
        *("mlp_flat", "tied", "unused", "head.bias", "norm.weight", "norm.bias"),
        *("norm.running_mean", "norm.running_var", "norm.num_batches_tracked"),
    }
    assert torch.equal(state["tied"], wrapper.tied)
    nested = nn.Sequential(wrapper)
    prefixed = wrapper.flat_state_dict(prefix="0.")
    wrapper.flat_params[0].data.zero_()
    nested.load_state_dict(prefixed | {"0.mlp_flat": torch.ones_like(state["mlp_flat"])})
    assert nested.state_dict()["0.mlp.0.weight"].eq(1).all()


def test_loading_converts_dtype_and_is_seen_by_module_attributes():
    wrapper = wrap_all()
    state = {key: value.bfloat16() for key, value in build(seed=4).state_dict().items()}
    wrapper.load_state_dict(state)
    assert wrapper.flat_param.dtype == torch.float32
    assert torch.equal(wrapper.module.head.bias, state["head.bias"].float())


def error_of(model: nn.Module, state: dict) -> str:
    with pytest.raises(RuntimeError) as caught:
        model.load_state_dict(state)
    lines = str(caught.value).splitlines()
    return "\n".join(sorted(lines[1:]))


def broken(state: dict) -> dict:
    """One problem of each kind, in flattened and other keys."""
    state = dict(state)
    bad = {
        "extra": torch.zeros(1),
        "mlp.7.weight": torch.zeros(1),
        "mlp.0.nonsense": torch.zeros(1),
        "module.unused": torch.zeros(3),
        "head.bias": torch.zeros(11, 1),
        "embedding.weight": "text",
        "norm.running_mean": torch.zeros(2),
    }
    for key in ("mlp.0.weight", "head.weight", "norm.running_var", "unused"):
        del state[key]
    return {**state, **bad}


def words(message: str) -> list[str]:
    """The message without the order in which keys are listed."""
    return sorted(message.replace(",", " ").replace(". ", " ").split())


@pytest.mark.parametrize(
    "groups", [all_in_one, two_groups, lambda model: [model.mlp[0].weight], lambda model: []]
)
def test_loading_reports_problems_as_the_plain_module_does(groups):
    state = broken(build().state_dict())
    expected = error_of(build(), state)
    for key in ("mlp.0.weight", "norm.running_var", "module.unused", "size mismatch for head.bias", "mlp.7"):
        assert key in expected
    assert words(error_of(wrap_all(groups=groups), state)) == words(expected)


def test_loading_reports_original_names_also_from_inside_other_modules():
    plain, nested = nn.Sequential(nn.Sequential(build())), nest(build())
    state = {f"0.0.{key}": value for key, value in broken(build().state_dict()).items()}
    assert words(error_of(nested, state)) == words(error_of(plain, state))


def test_a_child_called_module_keeps_its_name():
    def make():
        return nn.Sequential(OrderedDict(module=nn.BatchNorm1d(2), submodule=nn.Linear(2, 2)))

    for groups in (None, []):
        wrapper = FlattenParamsWrapper(make(), groups)
        assert list(wrapper.state_dict()) == list(make().state_dict())
        wrapper.load_state_dict(make().state_dict())
        state = {"module.bad": 1, "submodule.bad": 1, "bad": 1, "module.running_mean": torch.zeros(3)}
        assert words(error_of(wrapper, state)) == words(error_of(make(), state))


def test_messages_that_mention_several_keys_or_names_like_module():
    def make():
        return nn.ModuleDict({"a-module": nn.InstanceNorm1d(2), "module": nn.InstanceNorm1d(2)})

    state = {
        f"{name}.{key}": torch.zeros(2)
        for name in make()
        for key in ("running_mean", "running_var", "weight")
    }
    expected = error_of(make(), state)
    assert '"module.running_mean" and "module.running_var"' in expected
    for model in (FlattenParamsWrapper(make()), FlattenParamsWrapper(FlattenParamsWrapper(make()))):
        assert words(error_of(model, state)) == words(expected)


def test_not_strict_loading_reports_keys_and_loads_the_rest():
    wrapper, plain, source = wrap_all(), build(), build(seed=2).state_dict()
    for key in ("mlp.0.weight", "norm.running_mean"):
        del source[key]
    source["extra"] = torch.zeros(1)
    result, expected = (model.load_state_dict(source, strict=False) for model in (wrapper, plain))
    assert (
        sorted(result.missing_keys) == sorted(expected.missing_keys) == ["mlp.0.weight", "norm.running_mean"]
    )
    assert result.unexpected_keys == expected.unexpected_keys == ["extra"]
    assert_same_state(wrapper.state_dict(), plain.state_dict())


def test_a_flat_form_of_another_length_is_a_size_mismatch():
    with pytest.raises(RuntimeError, match=r"size mismatch for flat_param_0: .*\[5\].*current model is"):
        wrap_all().load_state_dict({**wrap_all().flat_state_dict(), "flat_param_0": torch.zeros(5)})


def test_loading_inside_unflatten_params_goes_to_the_registered_parameters():
    wrapper, source = wrap_all(), build(seed=6)
    with wrapper.unflatten_params():
        wrapper.module.unused = nn.Parameter(torch.zeros(3))
        wrapper.load_state_dict(source.state_dict())
    assert_same_state(wrapper.state_dict(), source.state_dict())
