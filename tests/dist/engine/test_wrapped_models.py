"""Uses of a model in which weights or gradients once went wrong: writing, replacing, compiling it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatfsdp import Debug, FlatFSDP, Precision, auto_wrap, by_class
from flatfsdp.optim import AdamW
from tests.support.models import FLAGS, Block, data, each_policy, grads_of, plain_net, same, update
from tests.support.models import wrapped as build
from tests.support.ranks import on_ranks

BF16 = Precision(compute=torch.bfloat16)


@FLAGS
@pytest.mark.parametrize("kind", ["frozen", "evaluated", "trained"])
@on_ranks(1, 2)
def test_a_write_through_data_is_seen(kind: str, flag: bool) -> None:
    """A moving average writes so, and no version counter sees it; one rank holds everything cast."""
    for write in (Tensor.fill_, lambda data, value: data.copy_(torch.full_like(data, value))):
        layer = nn.Linear(8, 8).requires_grad_(kind != "frozen")
        model = FlatFSDP(layer, precision=BF16, optimize_backward_concat=flag)
        # Between two forwards of a training, only writes that are counted are seen.
        for value in (0.5,) if kind == "trained" else (0.5, 1.0):
            for shard in model.parameters():
                write(shard.data, value)
            with torch.set_grad_enabled(kind == "trained"):
                assert (model(torch.ones(2, 8)) == 9 * value).all()


@on_ranks(2)
def test_parameters_are_written_and_not_replaced(rank: int) -> None:
    """Written values are used in the next forward, however they were written, unless memory was replaced."""
    tokens = next(data(rank, 1, 1))[0]
    model = build()
    shards = list(model.parameters())
    kept = [shard.detach().clone() for shard in shards]
    with torch.no_grad():
        before = model(tokens)
    for shard in shards:
        shard.data.zero_()
    with torch.no_grad():
        assert not torch.equal(model(tokens), before)
    torch.nn.utils.vector_to_parameters(torch.cat(kept), shards)
    with pytest.raises(RuntimeError, match=r"a parameter of unit root was given other memory \(p.data ="):
        model(tokens)


class Position(nn.Module):
    """A module whose result is in the memory of its parameter, or a copy."""

    def __init__(self, taken: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(7, 20))
        self.taken = taken

    def forward(self, length: int) -> Tensor:
        return self.taken(self.table[:length])


class Positioned(nn.Module):
    def __init__(self, taken: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.position = Position(taken)
        self.head = nn.Linear(20, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x + self.position(len(x))).sum()


@FLAGS
@on_ranks(2)
def test_a_unit_that_returns_its_parameter_is_told_to_copy_it(flag: bool) -> None:
    """A view of freed memory would end the process."""
    for taken in (Tensor.clone, Tensor.contiguous, Tensor.detach):
        model = auto_wrap(Positioned(taken), by_class(Position), optimize_backward_concat=flag)
        for context in (torch.enable_grad, torch.no_grad, torch.inference_mode):
            with context():
                if taken is Tensor.clone:
                    assert model(torch.ones(3, 20)).isfinite()
                    continue
                with pytest.raises(RuntimeError, match="unit position returned a parameter of its own"):
                    model(torch.ones(3, 20))


@FLAGS
@on_ranks(2)
def test_the_engine_is_not_compiled_with_the_model(rank: int, flag: bool) -> None:
    operators: set[str] = set()

    def backend(graph: Any, inputs: Any) -> Any:
        operators.update(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    batches = next(data(rank, 1, 2))
    models = [build(optimize_backward_concat=flag, debug=Debug(poison_on_free=True)) for _ in range(2)]
    losses = [
        [call(batch) for batch in batches] for call in (models[0], torch.compile(models[1], backend=backend))
    ]
    for of_model in losses:
        torch.autograd.backward(of_model)
    assert same(*losses)
    assert same(*map(grads_of, models))
    assert any("layer_norm" in name for name in operators)
    assert not any("gather" in name or "fill" in name for name in operators)


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.head = nn.Linear(20, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(x)).sum()


def norm(module: nn.Module) -> torch.Tensor:
    return torch.nn.utils.get_total_norm([p.grad for p in module.parameters()])


@FLAGS
@on_ranks(2)
def test_a_model_may_pass_gradients_on_and_keep_none(flag: bool) -> None:
    """A generator is trained through a critic, which keeps no gradient of that and is trained next."""
    torch.manual_seed(0)
    plain_generator, plain_judge = Block(), Critic()
    options = {"optimize_backward_concat": flag, "debug": Debug(poison_on_free=True)}
    generator = FlatFSDP(copy.deepcopy(plain_generator), **options)
    judge = auto_wrap(copy.deepcopy(plain_judge), by_class(Block), **options)
    noise = torch.ones(2, 20)

    plain_judge(plain_generator(noise)).backward()
    with judge.no_sync():
        judge(generator(noise)).backward()
    judge.zero_grad()
    torch.testing.assert_close(generator.clip_grad_norm_(torch.inf), norm(plain_generator))
    assert all(shard.grad is None for shard in judge.parameters())

    plain_judge.zero_grad()
    plain_judge(noise).backward()
    judge(noise).backward()
    torch.testing.assert_close(judge.clip_grad_norm_(torch.inf), norm(plain_judge))


@FLAGS
@on_ranks(2)
def test_a_replaced_parameter_is_noticed(rank: int, flag: bool) -> None:
    tokens = next(data(rank, 1, 1))[0]
    model = build(optimize_backward_concat=flag)
    model(tokens)
    model.head.weight = nn.Parameter(torch.ones(30, 20))
    with pytest.raises(RuntimeError, match=r"parameter head\.weight was replaced after sharding"):
        model(tokens)
    model = build(optimize_backward_concat=flag)
    with pytest.raises(TypeError, match="cannot assign"):
        model.head.weight = torch.ones(30, 20)
    with model.summon_full_params():
        model.head.weight = nn.Parameter(torch.ones(30, 20))
    model(tokens).backward()
    assert (model.state_dict()["head.weight"] == 1).all()


@FLAGS
@on_ranks(2)
def test_an_evaluation_has_the_weights_that_were_written_through_data(rank: int, flag: bool) -> None:
    """Weights are exchanged for an average through `.data`, right after an optimizer that writes what is
    gathered, and after a forward whose backward never comes."""
    tokens = next(data(rank, 1, 1))[0]
    model = build(optimize_backward_concat=flag, precision=BF16)
    optimizer = AdamW(model.parameters(), lr=0.1)
    average = build(seed=1, precision=BF16)
    for backward_follows in (True, False):
        loss = model(tokens)
        if backward_follows:
            loss.backward()
            optimizer.step()
        else:
            del loss
        trained = [shard.detach().clone() for shard in model.parameters()]
        for shard, value in zip(model.parameters(), average.parameters(), strict=True):
            shard.data.copy_(value)
        with torch.no_grad():
            assert torch.equal(model(tokens), average(tokens))
        for shard, value in zip(model.parameters(), trained, strict=True):
            shard.data.copy_(value)
        assert not torch.equal(model(tokens), average(tokens))


@on_ranks(2)
def test_a_model_may_be_transformed() -> None:
    """Inside torch.func's transformations the outputs of units have no memory of their own."""
    block = plain_net(Block)
    model = FlatFSDP(copy.deepcopy(block))
    x = torch.randn(3, 2, 20)
    with torch.no_grad():
        torch.testing.assert_close(torch.vmap(model)(x), block(x))
        torch.testing.assert_close(*(torch.func.jvp(f, (x,), (x,)) for f in (model, block)))


def test_parameters_on_one_rank_can_be_read_before_the_first_forward() -> None:
    plain = nn.Linear(4, 4)
    expected = plain.weight.detach().bfloat16()
    model = FlatFSDP(plain, precision=BF16)
    assert torch.equal(model.weight, expected)


# ---- units that write their result into their input ------------------------------------------------------


FEATURES = 8


class Added(nn.Module):
    """A module that adds a function of another input in place, as a diffusion block does with a time step."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh(), nn.Linear(FEATURES, FEATURES))

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        x += self.mlp(time)
        return x


class Grown(nn.Module):
    """A module that adds to its input, in place, what it computes from it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, FEATURES)

    def forward(self, x: Tensor, _time: Tensor) -> Tensor:
        return x.add_(self.linear(x.relu()))


class Net(nn.Module):
    def __init__(self, block: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.start = nn.Linear(FEATURES, FEATURES)
        self.blocks = nn.ModuleList(block() for _ in range(3))

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        x = self.start(x)
        for block in self.blocks:
            x = block(x, time)
        return x.square().mean()


@each_policy
@pytest.mark.parametrize("block", [Added, Grown])
@on_ranks(2)
def test_a_unit_that_writes_into_its_input(block: type[nn.Module], policy: Any) -> None:
    torch.manual_seed(0)
    plain = Net(block)
    model = auto_wrap(copy.deepcopy(plain), by_class(Added, Grown), **policy)
    ours = torch.optim.SGD(model.parameters(), lr=0.1)
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(3):
        # The same on all ranks, whose mean is then what one process computes.
        x, time = torch.randn(4, FEATURES), torch.randn(4, FEATURES)
        loss, expected = model(x, time), plain(x, time)
        loss.backward()
        expected.backward()
        update(ours, theirs)
        torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(model.state_dict(), plain.state_dict())
    assert model.fsdp_state.shared.ledger.calls["reduce"] == 3 * 4
