"""`enable_wrap`, `wrap` and `auto_wrap` wrap the same modules with the same arguments as fairscale's."""

from __future__ import annotations

from functools import partial
from types import ModuleType
from typing import Any

import pytest
from torch import nn

from flatfsdp.compat.fairscale import wrapping as ours


class Wrapped(nn.Module):
    """A stand-in for FSDP that remembers its arguments."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__()
        self.module = module
        self.options = options


def implementations() -> list[Any]:
    fairscale = pytest.importorskip
    return [
        pytest.param(lambda: ours, id="flatfsdp"),
        pytest.param(lambda: fairscale("fairscale.nn.wrap"), id="fairscale"),
    ]


@pytest.fixture(params=implementations())
def api(request: pytest.FixtureRequest) -> ModuleType:
    """The interface under test: the same tests pass with fairscale itself, if installed."""
    return request.param()


def wrapped_paths(module: nn.Module) -> list[str]:
    return [name.replace("module.", "") for name, m in module.named_modules() if isinstance(m, Wrapped)]


def chain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 5), nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 2)), nn.Linear(2, 9))


def by_size(api: ModuleType, numel: int, **options: Any) -> Any:
    return partial(api.default_auto_wrap_policy, min_num_params=numel, **options)


def test_without_enable_wrap_nothing_is_wrapped(api: ModuleType) -> None:
    module = chain()
    assert api.wrap(module) is module
    assert api.auto_wrap(module, by_size(api, 1)) is module
    assert wrapped_paths(module) == []


def test_arguments_of_wrap_override_the_modules_and_those_the_contexts(api: ModuleType) -> None:
    layer = nn.Linear(2, 2)
    layer.wrapper_config = {"b": 2, "c": 2}  # type: ignore[assignment]
    with api.enable_wrap(wrapper_cls=Wrapped, a=1, b=1, c=1):
        wrapped = api.wrap(layer, c=3)
    assert wrapped.module is layer
    assert wrapped.options == {"a": 1, "b": 2, "c": 3}


def test_enable_wrap_cannot_be_nested_and_ends_after_an_error(api: ModuleType) -> None:
    inner = api.enable_wrap(wrapper_cls=Wrapped)
    with api.enable_wrap(wrapper_cls=Wrapped), pytest.raises(NotImplementedError, match="nested"):
        inner.__enter__()
    layer = nn.Linear(2, 2)
    assert api.wrap(layer) is layer


def test_enable_wrap_needs_a_class() -> None:
    with pytest.raises(AssertionError, match="wrapper_cls"):
        ours.enable_wrap().__enter__()
    layer = nn.Linear(2, 2)
    assert ours.wrap(layer) is layer


@pytest.mark.parametrize(
    ("numel", "paths"),
    [
        # Sizes: 30 | 30 + 12 | 27.  A container whose parameters are all taken is not wrapped.
        (1, ["0", "1.0", "1.1", "2"]),
        (28, ["", "0", "1.0"]),
        (35, ["", "1"]),
        (90, [""]),
        (100, []),
    ],
)
def test_auto_wrap_by_size(api: ModuleType, numel: int, paths: list[str]) -> None:
    with api.enable_wrap(wrapper_cls=Wrapped):
        model = api.auto_wrap(chain(), by_size(api, numel))
    assert wrapped_paths(model) == paths


def test_the_root_can_be_wrapped_whatever_is_left(api: ModuleType) -> None:
    with api.enable_wrap(wrapper_cls=Wrapped):
        model = api.auto_wrap(chain(), by_size(api, 28, skip_params_check_for_root=True))
    assert isinstance(model, Wrapped)


def test_the_policy_of_the_context_is_the_default(api: ModuleType) -> None:
    with api.enable_wrap(by_size(api, 35), wrapper_cls=Wrapped, x=1):
        model = api.auto_wrap(chain(), y=2)
    inner = next(m for m in model.modules() if isinstance(m, Wrapped))
    assert inner.options == {"x": 1, "y": 2}


def test_attention_and_containers_stay_as_they_are(api: ModuleType) -> None:
    model = nn.ModuleDict({"a": nn.MultiheadAttention(4, 2), "b": nn.ModuleList([nn.Linear(4, 4)])})
    with api.enable_wrap(wrapper_cls=Wrapped):
        model = api.auto_wrap(model, by_size(api, 1))
    assert wrapped_paths(model) == ["b.0"]


def test_tagged_modules_are_wrapped_with_their_own_arguments(api: ModuleType) -> None:
    model = chain()
    model[1][0].wrapper_config = {"a": 2}
    with api.enable_wrap(api.config_auto_wrap_policy, wrapper_cls=Wrapped, a=1, b=1):
        assert api.auto_wrap(model) is model
    assert wrapped_paths(model) == ["1.0"]
    assert model[1][0].options == {"a": 2, "b": 1}


def test_auto_wrap_refuses_what_is_wrapped_already(api: ModuleType) -> None:
    with api.enable_wrap(wrapper_cls=Wrapped):
        model = nn.Sequential(api.wrap(nn.Linear(2, 2)))
        with pytest.raises(AssertionError):
            api.auto_wrap(model, by_size(api, 1))


def test_a_layer_in_two_places_becomes_one_wrapper() -> None:
    """fairscale wraps it at its first place only, and leaves the plain layer at the others."""
    layer = nn.Linear(3, 3)
    model = nn.Sequential(layer, nn.Sequential(layer, nn.Linear(3, 3)), layer)
    with ours.enable_wrap(wrapper_cls=Wrapped):
        ours.auto_wrap(model, by_size(ours, 12))
    assert isinstance(model[0], Wrapped)
    assert model[0] is model[1][0] is model[2]
