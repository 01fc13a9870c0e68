"""FlattenParamsWrapper under fairscale's names: the same program passes with fairscale's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatfsdp.compat.fairscale import FlattenParamsWrapper
from tests.support.flatten_models import AttentionModel, TiedLM, build, tokens, train

Wrap = Callable[..., Any]


@pytest.fixture(params=["flatfsdp", "fairscale"])
def wrap(request: pytest.FixtureRequest) -> Wrap:
    if request.param == "flatfsdp":
        return FlattenParamsWrapper
    return pytest.importorskip("fairscale.nn.misc").FlattenParamsWrapper


def split(model: nn.Module) -> list[list[nn.Parameter]]:
    """Two groups and an empty one, in another order than the module's."""
    parameters = list(model.parameters())
    return [parameters[3:][::-1], [], parameters[:3]]


def test_names_and_metadata_of_groups(wrap: Wrap) -> None:
    assert wrap(build(TiedLM)).flat_param_names == ["flat_param_0"]
    model = build(TiedLM)
    wrapper = wrap(model, split(model), ["late", "early"])
    assert wrapper.flat_param_names == ["flat_param_late", "flat_param_early"]
    assert [name for name, _ in wrapper.named_parameters()] == wrapper.flat_param_names
    assert len(wrapper.flat_params) == 2
    names, shapes, numels = wrapper.metadata(1)
    plain = build(TiedLM)
    bare = [name.replace("_fpw_module.", "") for name in names]
    assert shapes == [plain.get_parameter(name).shape for name in bare]
    assert numels == [shape.numel() for shape in shapes]
    order = [name for name, _ in plain.named_parameters()]
    assert bare == sorted(bare, key=order.index)
    assert wrapper.num_params_managed == len(order)


def test_trains_and_saves_like_the_plain_module(wrap: Wrap) -> None:
    results = []
    for factory in (lambda m: m, wrap):
        model = factory(build(AttentionModel))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
        losses = train(model, optimizer)
        results.append([*losses, *model.state_dict().values()])
    assert list(model.state_dict()) == list(build(AttentionModel).state_dict())
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_unflattened_parameters_are_ordinary_ones(wrap: Wrap) -> None:
    wrapper = wrap(build(TiedLM))
    with wrapper.unflatten_params():
        assert not wrapper.is_flattened
        wrapper.mlp[0].weight.data.fill_(2.0)
        assert wrapper.head.weight is wrapper.embedding.weight
    assert wrapper.is_flattened
    assert torch.equal(wrapper.state_dict()["mlp.0.weight"], torch.full((9, 6), 2.0))


def test_a_flat_state_dict_comes_back(wrap: Wrap) -> None:
    source, target = wrap(build(TiedLM, seed=1)), wrap(build(TiedLM, seed=2))
    saved = source.flat_state_dict()
    assert "flat_param_0" in saved
    target.load_state_dict({k: v.clone() for k, v in saved.items()})
    assert torch.equal(source(tokens()), target(tokens()))


def test_views_of_other_data_follow_it(wrap: Wrap) -> None:
    model = build(TiedLM)
    wrapper = wrap(model, split(model))
    other = torch.full_like(wrapper.flat_params[1], 7.0)
    views: list[Tensor] = list(wrapper.get_param_views([None, other]))
    assert len(views) == wrapper.num_params_managed
    assert sum(int((view == 7.0).all()) for view in views) == 3
    assert len(list(wrapper.get_param_views())) == len(views)


def test_a_parameter_in_two_groups_is_refused() -> None:
    model = build(TiedLM)
    weight = model.head.weight
    with pytest.raises(ValueError, match="groups 0 and 1"):
        FlattenParamsWrapper(model, [[weight], [model.embedding.weight]])


def test_a_foreign_parameter_is_refused() -> None:
    with pytest.raises(ValueError, match="not registered"):
        FlattenParamsWrapper(build(TiedLM), [[nn.Parameter(torch.zeros(2))]])
