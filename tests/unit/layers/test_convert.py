"""`convert`: nn.Linear layers become ours, and everything else about the model stays."""

from __future__ import annotations

import copy
import logging
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from flatfsdp import shard
from flatfsdp.fp8 import CurrentScaling, autocast
from flatfsdp.layers import convert
from flatfsdp.layers.convert import ConvertedLinear
from tests.support.assertions import assert_equal
from tests.support.fp8_layers import SHORT, fp8_state


def everything(linear: nn.Linear, name: str) -> bool:
    return True


class Model(nn.Module):
    """Tied weights, a shared module, one without bias, containers, and layers other than nn.Linear."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 32)
        self.first = nn.Linear(32, 48)
        self.body = nn.ModuleDict({"a": nn.Sequential(nn.GELU(), nn.Linear(48, 32, bias=False))})
        self.again = self.first
        self.attention = nn.MultiheadAttention(32, 2, batch_first=True)
        self.narrow = nn.Linear(32, 7)
        self.widen = nn.Linear(7, 32)
        self.head = nn.Linear(32, 32, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        x = self.body["a"](self.again(self.body["a"](self.first(x))))
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.head(x + self.widen(self.narrow(x)))


def model() -> Model:
    torch.manual_seed(0)
    return Model()


IDS = torch.arange(64).reshape(4, 16) % 32


def suits(linear: nn.Linear, name: str) -> bool:
    return linear.in_features % 16 == linear.out_features % 16 == 0


@pytest.mark.parametrize("fused", [False, True])
def test_parameters_names_and_ties_stay(fused: bool) -> None:
    before = model()
    parameters, keys = dict(before.named_parameters(remove_duplicate=False)), list(before.state_dict())
    hooked = []
    before.first.weight.register_hook(lambda grad: hooked.append(grad))
    before.first.weight.mark = "stays"
    before.first.bias.requires_grad_(False)
    after = convert(before, suits, fuse_wgrad_accumulation=fused)
    assert after is before
    assert list(after.state_dict()) == keys
    assert {n: id(p) for n, p in after.named_parameters(remove_duplicate=False)} == {
        n: id(p) for n, p in parameters.items()
    }
    assert after.first is after.again and isinstance(after.first, ConvertedLinear)
    assert after.head.weight is after.embedding.weight and after.first.weight.mark == "stays"
    assert not isinstance(after.attention.out_proj, ConvertedLinear) and type(after.narrow) is nn.Linear
    assert not after.first.bias.requires_grad
    assert after.first.fuse_wgrad_accumulation == fused
    if not fused:
        after(IDS).sum().backward()
        assert len(hooked) == 1


def test_without_autocast_the_bits_are_the_same() -> None:
    before, after = model(), convert(model(), everything)
    results = []
    for each in (before, after):
        out = each(IDS)
        out.square().sum().backward()
        results.append([out, *(p.grad for p in each.parameters())])
    assert_equal(*results)


def test_in_autocast_only_what_was_converted_is_fp8() -> None:
    converted, exact = convert(model(), suits), model()(IDS)
    with autocast(recipe=SHORT):
        out = converted(IDS)
    assert 1e-3 < (out - exact).norm() / exact.norm() < 0.1
    names = {key.rsplit(".", 1)[0] for key in fp8_state(converted)}
    assert names == {"first", "again", "body.a.1", "head"}


def test_layers_that_are_never_fp8() -> None:
    """They are for fused weight gradients alone; sizes do not matter then."""
    plain, converted = nn.Sequential(nn.Linear(5, 7)), nn.Sequential(nn.Linear(5, 7))
    converted.load_state_dict(plain.state_dict())
    convert(converted, fp8=False)
    converted[0].weight.main_grad = torch.zeros(7, 5)
    x = torch.randn(3, 5)
    for recipe in (SHORT, CurrentScaling()):
        with autocast(recipe=recipe):
            assert torch.equal(converted(x), plain(x))
    converted(x).sum().backward()
    plain(x).sum().backward()
    assert torch.equal(converted[0].weight.main_grad, plain[0].weight.grad)
    assert fp8_state(converted) == {}


def test_the_default_takes_layers_that_gain(caplog: pytest.LogCaptureFixture) -> None:
    sizes = [(1024, 1024), (1024, 1008), (2048, 1024), (1032, 2048), (4096, 16)]
    large = nn.Sequential(*(nn.Linear(*size, device="meta") for size in sizes))
    with caplog.at_level(logging.INFO, "flatfsdp"):
        convert(large)
    assert [isinstance(layer, ConvertedLinear) for layer in large] == [True, False, True, False, False]
    said = "converted 2 layers; matrices that stay as they are have 3,211,264 of 6,362,112 parameters"
    assert said in caplog.text
    with pytest.raises(ValueError, match=r"none of the 4 nn\.Linear"):
        convert(nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))))
    assert isinstance(convert(nn.Sequential(nn.Linear(8, 8)), fp8=False)[0], ConvertedLinear)


def test_the_filter_sees_names() -> None:
    seen = []
    converted = convert(model(), lambda linear, name: (seen.append(name), name == "body.a.1")[1])
    assert seen == ["first", "body.a.1", "narrow", "widen", "head"]
    assert [name for name, module in converted.named_modules() if isinstance(module, ConvertedLinear)] == [
        "body.a.1"
    ]


def test_a_model_that_is_a_linear_layer() -> None:
    linear = nn.Linear(32, 48).eval()
    layer = convert(linear, everything)
    assert layer is linear and isinstance(layer, ConvertedLinear) and not layer.training


def test_mode_dtype_and_device_stay() -> None:
    converted = convert(nn.Sequential(nn.Linear(32, 48)).bfloat16().eval(), everything)
    assert not converted[0].training and converted[0].weight.dtype == torch.bfloat16
    meta = convert(nn.Sequential(nn.Linear(32, 48, device="meta")), everything)
    assert meta[0].weight.is_meta and meta[0].bias.is_meta


def test_a_copy_of_a_converted_model() -> None:
    converted = convert(model(), suits)
    with autocast(recipe=SHORT):
        out = converted(IDS)
    other = copy.deepcopy(converted)
    assert other.head.weight is other.embedding.weight and other.first is other.again
    assert out.requires_grad


def test_subclasses_compute_something_else() -> None:
    class Scaled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    parametrized = nn.utils.parametrizations.weight_norm(nn.Linear(32, 32))
    converted = convert(nn.Sequential(Scaled(32, 32), parametrized, nn.Linear(32, 32)), everything)
    assert [isinstance(layer, ConvertedLinear) for layer in converted] == [False, False, True]


def test_a_sharded_model_is_refused() -> None:
    with pytest.raises(ValueError, match=r"0\.weight is sharded already; convert first, then shard or wrap"):
        convert(shard(nn.Sequential(nn.Linear(32, 32))), everything)


def test_hooks_are_called_as_before() -> None:
    layer, called = nn.Linear(32, 32), []
    layer.register_forward_hook(lambda *_: called.append("forward"))
    layer.register_forward_pre_hook(lambda *_: called.append("pre"))
    layer.register_full_backward_hook(lambda *_: called.append("backward"))
    layer.register_state_dict_post_hook(lambda *_: called.append("state"))
    converted = convert(nn.Sequential(layer), everything)
    converted(torch.randn(4, 32, requires_grad=True)).sum().backward()
    converted.state_dict()
    assert called == ["pre", "forward", "backward", "state"]


def test_a_weight_that_a_hook_computes_is_refused() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.utils.spectral_norm(nn.Linear(32, 32)))
    with pytest.raises(ValueError, match=r"1\.weight is no parameter, .*forward_pre_hooks"):
        convert(model, everything)
    assert type(model[0]) is nn.Linear, "nothing is half converted"


def test_copies_and_pickles_are_converted_too(tmp_path: Path) -> None:
    converted = convert(model(), suits, fp8=False)
    torch.save(converted, tmp_path / "model.pt")
    for other in (copy.deepcopy(converted), torch.load(tmp_path / "model.pt", weights_only=False)):
        assert isinstance(other.first, ConvertedLinear) and other.first is other.again
        assert not other.first.allows_fp8 and other.first.weight is not converted.first.weight
        assert torch.equal(other(IDS), converted(IDS))
