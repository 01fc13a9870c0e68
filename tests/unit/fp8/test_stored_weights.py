"""Weights that FlatFSDP stores in FP8: which ones, and unsupported combinations."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatfsdp import Precision, by_class, shard
from flatfsdp.engine.storage import fp8_storage
from flatfsdp.engine.storage.fp8_storage import FP8Shard
from flatfsdp.engine.storage.state import GroupState
from flatfsdp.flat.layout import Role
from flatfsdp.fp8 import BlockScaling, CurrentScaling, DelayedScaling, autocast
from flatfsdp.kernels.cast.shard_cast import max_abs_many
from flatfsdp.layers import Embedding, LayerNormLinear, Linear, convert
from tests.support.fp8_layers import TOKENS, WIDTH, Block, Stack, seeded

PRECISION = Precision(compute=torch.bfloat16, fp8_weights=CurrentScaling())


def stored(module: nn.Module) -> set[str]:
    """Names of the parameters that are stored in FP8 once `module` is wrapped."""
    model = shard(module, precision=PRECISION)
    return {
        slot.name
        for group in model.fsdp_state.groups
        for slot in group.layout.slots
        if group.layout.role is Role.FP8
    }


def tied(*layers: nn.Module) -> nn.Module:
    """Layers, the first two of which share one weight."""
    layers[0].weight = layers[1].weight
    return nn.Sequential(*layers)


def without_fp8() -> nn.Module:
    layers = nn.Sequential(Linear(32, 32), Linear(32, 32))
    layers[0].allows_fp8 = False
    return layers


def converted() -> nn.Module:
    return convert(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 40)), filter=lambda *_: True)


PIECES = ("query", "key", "value")


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (Block, {"up.weight", "down.weight", "mlp.fc1_weight", "mlp.fc2_weight"}),
        (lambda: nn.Sequential(Linear(32, 40), LayerNormLinear(40, 32), Linear(32, 32)), {"2.weight"}),
        (lambda: nn.Sequential(Linear(32, 32), Linear(32, 0)), {"0.weight"}),
        (without_fp8, {"1.weight"}),
        (lambda: tied(Embedding(32, 32), Linear(32, 32), Linear(32, 32)), {"2.weight"}),
        (lambda: tied(Linear(32, 32), Linear(32, 32)), {"0.weight"}),
        (converted, {"0.weight"}),
        # They have one scale, if each piece has a size that suits GEMMs.
        (lambda: nn.Sequential(Linear(32, 48, parameters_split=PIECES)), {f"0.{p}_weight" for p in PIECES}),
        (
            lambda: nn.Sequential(Linear(48, 32, parameters_split={"a": 8, "b": 24}), Linear(32, 32)),
            {"1.weight"},
        ),
    ],
    ids=["FP8", "sizes", "empty", "off", "read by others", "tied", "converted", "pieces", "odd pieces"],
)
def test_weights_that_only_fp8_products_read(make: Any, names: set[str]) -> None:
    assert stored(make()) == names


def forward(recipe: Any) -> Tensor:
    model = shard(seeded(partial(Stack, blocks=1)), by_class(Block), precision=PRECISION)
    with autocast(enabled=recipe is not None, recipe=recipe):
        return model(torch.randn(TOKENS, WIDTH))


def test_a_scale_for_each_block_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"weight is kept in FP8 .* keep weights in 16 bits"):
        forward(BlockScaling())


@pytest.mark.parametrize("recipe", [CurrentScaling(), DelayedScaling(), None])
def test_either_scaling_of_tensors_will_do_and_none(recipe: Any) -> None:
    assert forward(recipe).isfinite().all()


def test_a_model_without_such_layers_is_refused() -> None:
    model = shard(nn.Linear(32, 32), precision=PRECISION)
    with pytest.raises(ValueError, match="no layer has a weight that only FP8 GEMMs read"):
        model(torch.randn(16, 32))


def test_units_have_one_way_to_scale() -> None:
    other = Precision(compute=torch.bfloat16, fp8_weights=CurrentScaling(power_of_two_scales=False))
    model = nn.Sequential(*(shard(Linear(32, 32), precision=p) for p in (PRECISION, other)))
    with pytest.raises(ValueError, match=r"unit 1 has fp8_weights=.* make them equal"):
        shard(model, precision=Precision(compute=torch.bfloat16))(torch.randn(16, 32))


@pytest.mark.parametrize("value", [True, DelayedScaling(), "fp8"])
def test_only_current_scaling(value: Any) -> None:
    with pytest.raises(ValueError, match=r"Precision.fp8_weights is .* must be a CurrentScaling or None"):
        Precision(fp8_weights=value)


@pytest.mark.parametrize("station", ["param", "compute"])
def test_not_from_float64(station: str) -> None:
    with pytest.raises(ValueError, match=r"cast to FP8 from FP32, bf16 or fp16"):
        Precision(fp8_weights=CurrentScaling(), **{station: torch.float64})


def test_a_kept_weight_reads_as_nan() -> None:
    """Computing with the parameter itself is noticed."""
    model = shard(nn.Sequential(Linear(32, 32), Linear(32, 32)), precision=PRECISION)
    weight = model[0].weight
    assert weight.shape == (32, 32) and weight.dtype == torch.bfloat16 and weight.isnan().all()


@pytest.mark.parametrize("eps", [0.0, 3.0])
@pytest.mark.parametrize("power_of_two", [True, False])
def test_scales_are_those_of_the_recipe(eps: float, power_of_two: bool) -> None:
    recipe = CurrentScaling(amax_epsilon=eps, power_of_two_scales=power_of_two)
    net = seeded(Block)
    weight = net.down.weight.detach().clone()
    model = shard(net, precision=Precision(compute=torch.bfloat16, fp8_weights=recipe))
    with autocast(recipe=recipe):
        model(torch.randn(TOKENS, WIDTH))
    operand = model.down.weight.fp8_operand()
    scale = 448 / max(weight.bfloat16().abs().max().item(), eps)
    scale = 2.0 ** torch.tensor(scale).log2().floor().item() if power_of_two else scale
    torch.testing.assert_close(operand.rowwise_inv.item(), 1 / scale, rtol=1e-6, atol=0)
    expected = (weight.bfloat16().float() * torch.tensor(scale)).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(operand.rowwise.float(), expected.float())


def test_overflow_saturates_and_nan_stays() -> None:
    net = seeded(Block)
    with torch.no_grad():
        net.down.weight[0, 0] = torch.nan
    model = shard(net, precision=PRECISION)
    with autocast(recipe=CurrentScaling()):
        assert model(torch.randn(TOKENS, WIDTH)).isnan().any()


def test_the_amax_of_an_offloaded_weight_is_taken_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """The meta device stands for a GPU."""
    model = shard(nn.Sequential(Linear(32, 32), Linear(32, 32)), precision=PRECISION)
    (group,) = (group for group in model.fsdp_state.groups if group.layout.role is Role.FP8)
    monkeypatch.setattr(model.fsdp_state.shared, "device", torch.device("meta"))
    group.master.state = GroupState()
    offloaded = FP8Shard(group.master)
    model.fsdp_state.shared.ledger.reset()
    taken: list[Tensor] = []

    def take(sources: Any, amax: Tensor, **options: Any) -> None:
        max_abs_many(sources, amax, **options)
        taken.append(amax)

    monkeypatch.setattr(fp8_storage, "max_abs_many", take)
    offloaded.measure()
    assert model.fsdp_state.shared.ledger.bytes["measure"] == 2 * 32 * 32 * 4
    whole = group.layout.views(group.master.flat.detach())
    assert taken[0].tolist() == [weight.bfloat16().abs().max().item() for weight in whole]
    assert offloaded.amax.is_meta
