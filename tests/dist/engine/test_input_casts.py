"""FP32 inputs are cast where a parameter meets them; what else a forward is given stays what it is."""

from __future__ import annotations

import math
import weakref
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from flatfsdp import Precision, by_class, shard
from flatfsdp.engine.step.driven_unit import is_cast
from flatfsdp.fp8 import CurrentScaling, autocast
from flatfsdp.layers import convert
from tests.support.ranks import on_ranks

WIDTH = 16
BF16 = Precision(compute=torch.bfloat16)
BOTH_FLAGS = pytest.mark.parametrize("flag", [False, True])


class Block(nn.Module):
    """Notes the dtypes of what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor, *others: Any, bias: Tensor | None = None) -> Tensor:
        given = (x, *others) if bias is None else (x, *others, bias)
        self.seen = [each.dtype for each in given if isinstance(each, Tensor)]
        y: Tensor = x + self.down(self.up(x).relu())
        return y


class Net(nn.Module):
    """A regression with a time for each row, and a positional encoding that is neither buffer nor bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 1)
        self.positions = torch.linspace(-1.0, 1.0, WIDTH)

    def forward(self, x: Tensor, labels: Tensor, times: Tensor | None = None) -> Tensor:
        x = self.embedding(x)
        self.times = times
        for block in self.blocks:
            x = block(x + self.positions)
        return F.mse_loss(self.head(x).squeeze(-1), labels)


def net(kind: type[nn.Module] = Net, **options: Any) -> Any:
    torch.manual_seed(0)
    return shard(kind(), by_class(Block), **{"precision": BF16, **options})


@BOTH_FLAGS
@pytest.mark.parametrize("world_size", [1, 2])
@on_ranks()
def test_labels_reach_the_loss_as_they_are(flag: bool) -> None:
    model = Net()
    nn.init.zeros_(model.head.weight)
    nn.init.constant_(model.head.bias, 1004.0)
    model = shard(model, by_class(Block), precision=BF16, optimize_backward_concat=flag)
    labels = torch.tensor([1001.0, 1003.0, 1005.0, 1007.0])
    loss = model(torch.randn(4, WIDTH), labels)
    assert loss.item() == 5.0  # 8.0 with labels of 8 bits
    loss.backward()


@on_ranks(1)
def test_times_reach_the_model_as_they_are() -> None:
    unix = torch.arange(6, dtype=torch.float64) * 17.0 + 1.7e9
    steps = torch.tensor([999.0, 998.5])
    for precision, times in ((Precision(), unix), (BF16, unix), (BF16, steps)):
        model = net(precision=precision)
        model(torch.randn(2, WIDTH), torch.zeros(2), times=times)
        assert model.times is times


class Diffusion(nn.Module):
    """The time's sines are taken in FP32 and meet a weight afterwards, as in DiT."""

    def __init__(self) -> None:
        super().__init__()
        self.time, self.block = nn.Linear(WIDTH, WIDTH), Block()

    def forward(self, x: Tensor, times: Tensor) -> Tensor:
        angles = times[:, None] * torch.logspace(0, -3, WIDTH // 2)
        y: Tensor = self.block(
            x.to(self.time.weight.dtype) + self.time(torch.cat([angles.sin(), angles.cos()], -1))
        )
        return y


def trained(model: Any, rank: int, steps: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        loss = model(torch.randn(16, WIDTH, generator=generator), torch.ones(16))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


@pytest.mark.parametrize("world_size", [1, 2])
@on_ranks()
def test_a_plain_fp32_tensor_between_units_trains_in_bf16_as_written(rank: int) -> None:
    losses, others = (trained(net(optimize_backward_concat=flag), rank) for flag in (False, True))
    assert losses[-1] < losses[0]
    assert all(map(torch.equal, losses, others))


@on_ranks(2)
def test_a_plain_fp32_tensor_between_units_trains_in_fp8_as_written(rank: int) -> None:
    torch.manual_seed(0)
    model = convert(Net(), filter=lambda _, name: name.startswith("blocks"))
    precision = Precision(compute=torch.bfloat16, fp8_weights=CurrentScaling())
    model = shard(model, by_class(Block), precision=precision)
    with autocast(recipe=CurrentScaling()):
        losses = trained(model, rank)
    assert losses[-1] < losses[0]


@on_ranks(2)
def test_a_unit_casts_its_first_argument_alone_and_only_from_fp32() -> None:
    """The others may be tables of a rotary embedding, or a residual that is FP32 on purpose."""
    model = net()
    block, x = model.blocks[0], torch.randn(2, WIDTH)
    model(x, torch.zeros(2))
    block(x, x, torch.arange(2), bias=x)
    assert block.seen == [torch.bfloat16, torch.float32, torch.int64, torch.float32]
    block(x=x, bias=x)
    assert block.seen == [torch.bfloat16, torch.float32]
    for other in (x.double(), x.half()):
        with pytest.raises(RuntimeError, match="same dtype"):
            block(other)
        assert block.seen == [other.dtype]


class Sparse(nn.Module):
    """Layers that append their losses to a list, and keep a state in FP32."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kind() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        losses: list[Tensor] = []
        state = {"h": torch.zeros(WIDTH)}
        for layer in self.layers:
            # In FP32 on purpose, beside activations of 16 bits, as the weights of experts.
            x = layer(x, losses, state, routing=x.float() if x.dtype == torch.bfloat16 else None)
        return x.float().sum() + torch.stack(losses).sum() + state["h"].sum()


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(
        self, x: Tensor, losses: list[Tensor], state: dict[str, Tensor], routing: Tensor | None
    ) -> Tensor:
        assert x.dtype == self.weight.dtype == torch.bfloat16
        assert routing is None or routing.dtype == torch.float32
        losses.append((x.float() * 1e-3).square().mean(0))
        state["h"] = state["h"] + self.weight.float()
        assert state["h"].dtype == torch.float32
        return x * self.weight


@pytest.mark.parametrize("policy", ["units", "one unit"])
@on_ranks(1)
def test_lists_and_dicts_that_layers_write_to_are_the_callers(policy: str) -> None:
    model = shard(Sparse(Expert), by_class(Expert) if policy == "units" else None, precision=BF16)
    x = torch.ones(2, WIDTH)
    assert model(x).item() == pytest.approx(WIDTH * (2 + 3e-6 + 3), abs=1e-5)


@on_ranks(2)
def test_gradients_of_fp32_inputs_arrive_in_fp32() -> None:
    """Through the door of a unit inside, and through the outermost one's modules."""
    model = net(kind=Diffusion)
    for given in ([True, False], [False, True]):
        x, times = (torch.ones(2, *s, requires_grad=g) for s, g in zip([(WIDTH,), ()], given, strict=True))
        model(x, times).float().square().sum().backward()
        grad = (x if given[0] else times).grad
        assert grad is not None and grad.dtype == torch.float32 and bool(grad.abs().sum() > 0)


@on_ranks(2)
def test_an_outermost_layer_casts_its_own_inputs() -> None:
    x, state = torch.randn(3, WIDTH), torch.zeros(1, WIDTH)
    assert shard(nn.Linear(WIDTH, 2), precision=BF16)(x).dtype == torch.bfloat16
    output, states = shard(nn.LSTM(WIDTH, WIDTH), precision=BF16)(x, (state, state))
    assert {output.dtype, *(each.dtype for each in states)} == {torch.bfloat16}


@on_ranks(1)
def test_cast_inputs_false_casts_nothing() -> None:
    model = net(cast_inputs=False)
    with pytest.raises(RuntimeError, match="same dtype"):
        model(torch.randn(2, WIDTH), torch.zeros(2))
    model = net(cast_inputs=False)
    with pytest.raises(RuntimeError, match="same dtype"):  # FP32 by its positions
        model(torch.randn(2, WIDTH).bfloat16(), torch.zeros(2))
    assert model.blocks[0].seen == [torch.float32]


@on_ranks(1)
def test_there_are_hooks_only_where_something_is_cast() -> None:
    def hooked(model: nn.Module) -> list[str]:
        modules = model.named_modules()
        return [name for name, m in modules if any(map(is_cast, m._forward_pre_hooks.values()))]

    x, labels = torch.randn(2, WIDTH), torch.zeros(2)
    for options in ({"precision": Precision()}, {"cast_inputs": False}):
        model = net(**options)
        model(x.to(model.fsdp_state.policy.precision.compute), labels) if "precision" in options else None
        model.state_dict()
        assert not hooked(model)
    model = net()
    # Others' hooks, partial functions or not, are no casts.
    for hook in (partial(lambda *_: None), lambda *_: None):
        model.blocks[0].up.register_forward_pre_hook(hook)
    for _ in range(2):
        model(x, labels)
        assert hooked(model) == ["embedding", "head"]


@on_ranks(1)
def test_a_layer_that_was_a_model_of_its_own_casts_as_a_unit_afterwards() -> None:
    block, x = shard(Block(), precision=BF16), torch.randn(2, WIDTH)
    assert block(x).dtype == torch.float32  # a residual of what it was given
    assert any(map(is_cast, block.up._forward_pre_hooks.values()))
    outer = shard(nn.Sequential(block), precision=BF16)
    assert outer(x).dtype == torch.bfloat16
    assert not any(map(is_cast, block.up._forward_pre_hooks.values()))


class Cache(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.is_freed = False

    def forward(self, x: Tensor, cache: dict[str, Tensor]) -> Tensor:
        old = weakref.ref(cache["k"])
        cache["k"] = torch.cat([cache["k"], x])
        self.is_freed = old() is None
        y: Tensor = self.linear(cache["k"].to(self.linear.weight.dtype))
        return y


@on_ranks(1)
def test_inputs_are_the_callers_and_nobody_keeps_them() -> None:
    """A forward may replace them, and their memory is free then; it is free once the caller drops them."""
    for precision in (Precision(), BF16):
        model, cache = shard(Cache(), precision=precision), {"k": torch.randn(2, WIDTH)}
        x = torch.randn(1, WIDTH)
        alive = weakref.ref(x)
        with torch.no_grad():
            model(x, cache)
        assert model.is_freed
        del x
        assert alive() is None


@on_ranks(1)
def test_a_compiled_model_casts_as_an_eager_one(rank: int) -> None:
    def compiled(whole: bool) -> list[Tensor]:
        torch._dynamo.reset()
        model = net()
        graphs = CompileCounterWithBackend("aot_eager")
        if whole:
            losses = trained(torch.compile(model, backend=graphs), rank)
        else:
            for block in model.blocks:
                block.compile(backend=graphs)
            losses = trained(model, rank)
            assert graphs.frame_count == 1
        torch._dynamo.reset()
        return losses

    eager = trained(net(), rank)
    assert all(map(torch.equal, compiled(whole=False), eager))
    assert all(map(torch.equal, compiled(whole=True), eager))


@on_ranks(1)
def test_a_compiled_module_of_the_outermost_unit_is_one_graph_with_its_casts() -> None:
    torch._dynamo.reset()
    graphs = CompileCounterWithBackend("aot_eager")
    model = shard(nn.Sequential(Block()), precision=BF16)
    block: Any = model[0]
    block.compile(backend=graphs)
    for _ in range(2):
        model(torch.randn(2, WIDTH))
    assert graphs.frame_count == 1
    assert block.seen == [torch.float32]
    torch._dynamo.reset()


@on_ranks(1)
def test_attention_gets_masks_in_the_dtype_of_its_weights() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(WIDTH, 2)

        def forward(self, x: Tensor) -> Tensor:
            mask = nn.Transformer.generate_square_subsequent_mask(4)
            y: Tensor = self.attention(x, x, x, attn_mask=mask)[0]
            return y

    x = torch.randn(4, WIDTH)
    model = shard(nn.Sequential(Net(), nn.Linear(WIDTH, 1)), by_class(nn.Linear), precision=BF16)
    assert model(x).dtype == torch.bfloat16
    assert math.isfinite(model(x).sum().item())
