"""Writes to parameters in place, in a forward or between two, raise on all ranks; nothing else does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flatfsdp import Precision, by_class, shard
from flatfsdp.optim import AdamW
from tests.support.against_plain import assert_equal
from tests.support.meshes import REPLICATED, placed
from tests.support.models import FLAGS, Block, build, data, each_policy, grads_of, same, whole_grads
from tests.support.ranks import on_ranks

WRITTEN = "forward of unit {} wrote in place to parameter .*{}"


class Renormed(nn.Module):
    """An embedding that shortens its longest rows before it reads them, then a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4, max_norm=0.1)
        self.out = nn.Linear(4, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.table(tokens))


def small(seed: int = 0, **options: Any) -> Any:
    """Two units; the inner one writes."""
    torch.manual_seed(seed)
    return shard(nn.Sequential(shard(Renormed(), **options), nn.Linear(4, 4)), **options)


def tokens_of(rank: int) -> Tensor:
    """The second rank's tokens are rows that are short enough."""
    return torch.tensor([1, 2, 3]) if rank == 0 else torch.tensor([9])


def shorten(model: Any) -> None:
    with model.summon_full_params(), torch.no_grad():
        model[0].table.weight[9] = 0.0


@FLAGS
@on_ranks(1, 2)
def test_an_embedding_that_renormalises_raises_on_all_ranks(rank: int, flag: bool) -> None:
    for options in (
        {},
        {"reshard_after_forward": False},
        {"precision": Precision(compute=torch.bfloat16)},
        REPLICATED,
    ):
        for grad in (True, False):
            model = small(optimize_backward_concat=flag, **placed(options))
            shorten(model)
            message = WRITTEN.format("0", r"0\.table\.weight")
            with torch.set_grad_enabled(grad), pytest.raises(RuntimeError, match=message) as error:
                model(tokens_of(rank))
            # With the flag off there is one counter for all views, and still one of them is named.
            assert "out.bias" not in str(error.value)
    with pytest.raises(RuntimeError, match=WRITTEN.format("root", r"table\.weight")):
        shard(Renormed(), optimize_backward_concat=flag)(tokens_of(rank))


def test_a_failed_step_says_what_it_drops_if_it_drops_anything(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        model = small()
        with pytest.raises(RuntimeError, match="wrote in place"):
            model(tokens_of(0))
    assert caplog.messages == []
    table = model[0].table
    table.max_norm = None
    with model.no_sync():
        model(tokens_of(0)).sum().backward()
    table.max_norm = 0.1
    with pytest.raises(RuntimeError, match="wrote in place"):
        model(tokens_of(0))
    assert [message[:13] for message in caplog.messages] == ["a step failed"]


@on_ranks(2)
def test_a_step_after_the_error_is_clean(rank: int) -> None:
    """With the flag on nothing else remembers the write: the next step gathers the shards anew."""
    written, fresh = (small() for _ in range(2))
    with pytest.raises(RuntimeError, match="wrote in place"):
        written(tokens_of(0))
    for model in (written, fresh):
        model[0].table.max_norm = None
        model(tokens_of(rank)).sum().backward()
    assert same(grads_of(written), grads_of(fresh)) and grads_of(fresh)
    # The way out that the message names.
    with written.summon_full_params(), torch.no_grad():
        written[0].table.weight.renorm_(2, 0, 0.1)
    written(tokens_of(rank)).sum().backward()
    with written.summon_full_params():
        assert (written[0].table.weight.norm(dim=1) <= 0.1 + 1e-6).all()


class Codebook(nn.Module):
    """A module that counts its forwards in a frozen parameter and, legally, in a buffer."""

    def __init__(self, *, in_parameter: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.count = nn.Parameter(torch.zeros(1), requires_grad=False)
        self.register_buffer("calls", torch.zeros(1))
        self.in_parameter = in_parameter

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            (self.count if self.in_parameter else self.calls).add_(1.0)
        return (x * self.weight).relu_()


@FLAGS
@on_ranks(2)
def test_frozen_parameters_are_watched_and_buffers_are_not(flag: bool) -> None:
    with pytest.raises(RuntimeError, match=WRITTEN.format("root", "count, and what")):
        shard(Codebook(in_parameter=True), optimize_backward_concat=flag)(torch.ones(4))
    model = shard(Codebook(in_parameter=False), optimize_backward_concat=flag)
    for _ in range(2):
        model(torch.ones(4)).sum().backward()
    assert model.calls == 2.0


class WritesLater(nn.Module):
    """A module that writes in the recomputation only."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 2:
            with torch.no_grad():
                self.weight.mul_(0.5)
        return x * self.weight


@pytest.mark.parametrize("reentrant", [True, False])
@on_ranks(2)
def test_a_recomputation_is_watched_too(reentrant: bool) -> None:
    unit = shard(WritesLater())
    x = torch.ones(4, requires_grad=True)
    with pytest.raises(RuntimeError, match="wrote in place to parameter weight"):
        checkpoint(unit, x, use_reentrant=reentrant).sum().backward()


@FLAGS
@on_ranks(2)
def test_a_compiled_module_is_watched_too(rank: int, flag: bool) -> None:
    for grad in (True, False):
        model = small(optimize_backward_concat=flag)
        model[0].compile(backend="aot_eager")
        message = WRITTEN.format("0", r"0\.table\.weight")
        if grad and not flag:
            # The compiler runs nothing: it refuses the view, as PyTorch does.
            message = "a view and its base or another view of its base has been modified inplace"
        with torch.set_grad_enabled(grad), pytest.raises(RuntimeError, match=message):
            model(tokens_of(rank))
        torch._dynamo.reset()


# ---- writes between forwards raise at the next use -------------------------------------------------------


MESSAGE = r"blocks\.0\.up\.weight.* was written to as an attribute.*summon_full_params"


def zero_a_row(weight: Tensor) -> None:
    weight.data[0].zero_()


def give_other_data(weight: Tensor) -> None:
    weight.data = torch.ones(weight.shape)


def fill_in_inference_mode(weight: Tensor) -> None:
    with torch.inference_mode():
        weight.fill_(1.0)


COUNTED: list[Callable[[Tensor], Any]] = [
    nn.init.zeros_,
    nn.init.ones_,
    nn.init.eye_,
    lambda weight: nn.init.constant_(weight, 0.5),
    give_other_data,
]
UNCOUNTED: list[Callable[[Tensor], Any]] = [
    lambda weight: weight.data.zero_(),
    lambda weight: weight.data.fill_(1.0),
    lambda weight: weight.detach().zero_(),
    lambda weight: torch._foreach_zero_([weight.data]),
    zero_a_row,
    fill_in_inference_mode,
]


def model_of(**options: Any) -> tuple[Any, nn.Linear]:
    model = build(**options)
    layer = next(module for module in model.modules() if isinstance(module, Block)).up
    return model, layer


def batch_of(rank: int) -> Tensor:
    return next(data(rank, 1, 1))[0]


@FLAGS
@on_ranks(1, 2)
def test_writes_raise_at_the_next_forward_and_nothing_is_lost(rank: int, world_size: int, flag: bool) -> None:
    model, layer = model_of(optimize_backward_concat=flag)
    loss = model(batch_of(rank))
    for write in COUNTED + (UNCOUNTED if world_size > 1 else []):
        write(layer.weight)
        with pytest.raises(RuntimeError, match=MESSAGE):
            model(batch_of(rank))
        with torch.no_grad():
            # The error comes once, and the write has changed nothing.
            assert world_size == 1 or torch.equal(model(batch_of(rank)), loss)
        if world_size > 1:
            assert layer.weight.isnan().all()


@FLAGS
@on_ranks(1, 2)
def test_every_other_use_raises_too(rank: int, flag: bool) -> None:
    model, layer = model_of(optimize_backward_concat=flag)
    model(batch_of(rank)).backward()

    def summon() -> None:
        with model.summon_full_params():
            pass

    def evaluate() -> None:
        with torch.no_grad():
            model(batch_of(rank))

    def keep() -> None:
        with model.unsharded():
            pass

    for use in (evaluate, summon, keep, model.state_dict, lambda: model.clip_grad_norm_(1.0)):
        nn.init.zeros_(layer.weight)
        with pytest.raises(RuntimeError, match=MESSAGE):
            use()
        use()


@FLAGS
@on_ranks(2)
def test_a_write_between_forward_and_backward_raises(rank: int, flag: bool) -> None:
    for write in (*COUNTED, *UNCOUNTED):
        model, layer = model_of(optimize_backward_concat=flag)
        loss = model(batch_of(rank))
        write(layer.weight)
        with pytest.raises(RuntimeError, match=MESSAGE):
            loss.backward()


class NormalizesItsWeight(nn.Linear):
    """A layer that gives its weight other memory in each forward, as face recognition does."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data = nn.functional.normalize(self.weight.data)
        return super().forward(x)


@FLAGS
@on_ranks(1, 2)
def test_other_memory_that_a_forward_gives_its_weight_raises(flag: bool) -> None:
    model = nn.Sequential(NormalizesItsWeight(4, 4), nn.ReLU())
    model = shard(model, by_class(NormalizesItsWeight), optimize_backward_concat=flag)
    with pytest.raises(RuntimeError, match=r"forward of unit 0 wrote in place to parameter 0\.weight"):
        model(torch.ones(2, 4))


@FLAGS
@on_ranks(2)
def test_reading_a_placeholder_is_no_write(rank: int, flag: bool) -> None:
    """Not even where PyTorch gives memory away that could be written to."""
    model, layer = model_of(optimize_backward_concat=flag)
    reads: list[Callable[[Tensor], Any]] = [repr, Tensor.data_ptr, Tensor.tolist, Tensor.norm, torch.clone]
    for read in (*reads, lambda weight: weight.detach().numpy()):
        read(layer.weight)
        model(batch_of(rank)).backward()
        assert layer.weight.isnan().all()
    # ... and the next write is seen again.
    layer.weight.data.zero_()
    with pytest.raises(RuntimeError, match=MESSAGE):
        model(batch_of(rank))


# ---- a backward whose parameters have changed since its forward raises -----------------------------------


def batches(rank: int) -> list[Tensor]:
    return next(data(rank, 1, 3))


def step_of(model: Any, kind: str) -> Callable[[], Any]:
    """Something that changes the parameters of all units."""
    if kind == "ours":
        return AdamW(model.parameters(), lr=0.1).step
    if kind == "load":
        state = {name: value.clone() for name, value in model.state_dict().items()}
        return lambda: model.load_state_dict(state)
    return torch.optim.SGD(model.parameters(), lr=0.1).step


@each_policy
@pytest.mark.parametrize("kind", ["torch", "ours", "load"])
@on_ranks(1, 2)
def test_a_graph_from_before_a_change_raises(rank: int, kind: str, policy: Any) -> None:
    precision = Precision(compute=torch.bfloat16 if kind == "ours" else torch.float32)
    model, fresh = (build(precision=precision, **policy) for _ in range(2))
    change = step_of(model, kind)
    first, second, third = batches(rank)
    kept = model(first)
    model(second).backward()
    change()
    with pytest.raises(RuntimeError, match=r"parameters of unit root changed between this forward and its"):
        kept.backward()
    model.zero_grad()
    # The next step is clean.
    model(third).backward()
    fresh.load_state_dict(model.state_dict())
    fresh(third).backward()
    assert_equal(whole_grads(model), whole_grads(fresh))


@FLAGS
@on_ranks(2)
def test_a_rank_of_padding_alone_raises_with_the_others(flag: bool) -> None:
    """The second rank has only padding, and raises with the first one."""
    model = shard(nn.Linear(2, 2), optimize_backward_concat=flag)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.ones(3, 2)
    kept = model(x).sum()
    model(x).sum().backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="unit root changed between this forward and its backward"):
        kept.backward()


@on_ranks(2)
def test_the_unit_is_named(rank: int) -> None:
    """The message names the unit that changed."""
    model = build()
    loss = model(batches(rank)[0])
    with torch.no_grad():
        next(model.blocks[1].parameters()).mul_(0.5)
    with pytest.raises(RuntimeError, match=r"parameters of unit blocks\.1 changed"):
        loss.backward()


@each_policy
@on_ranks(1, 2)
def test_backwards_with_the_same_parameters_do_not_raise(rank: int, policy: Any) -> None:
    """Several forwards before a backward, several backwards of one forward, and evaluations in between."""
    model = build(**policy)
    tokens = batches(rank)
    model(tokens[0]).backward()
    expected = grads_of(model)
    model.zero_grad()
    losses = [model(each) for each in tokens]
    with torch.no_grad():
        model(tokens[0])
    model.state_dict()
    losses[0].backward(retain_graph=True)
    assert same(grads_of(model), expected)
    losses[0].backward()
    assert same(grads_of(model), [2 * grad for grad in expected])
    (losses[1] + losses[2]).backward()
    model.zero_grad()


@FLAGS
@on_ranks(2)
def test_a_step_of_another_model_in_between_is_no_change(flag: bool) -> None:
    """A step of the critic between forward and backward of the generator changes the critic alone."""
    torch.manual_seed(0)
    generator = shard(nn.Linear(4, 4), optimize_backward_concat=flag)
    critic = shard(nn.Linear(4, 1), optimize_backward_concat=flag)
    optimizer = torch.optim.SGD(critic.parameters(), lr=0.1)
    fake = generator(torch.ones(2, 4))
    critic(fake.detach()).sum().backward()
    optimizer.step()
    critic(fake).sum().backward()
    assert all(p.grad.isfinite().all() for p in generator.parameters())
