"""Flag on == flag off, bit for bit, and both equal the unsharded model; for every strategy and precision."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial, reduce
from typing import Any

import pytest
import torch
from torch import Tensor

from flatfsdp import Debug, Lanes, Precision, Prefetch, by_class, microbatches, shard
from flatfsdp.engine.storage.main_grad import MainGrad
from flatfsdp.engine.whole import grad_sync
from flatfsdp.engine.whole.units import named_groups
from flatfsdp.options import Policy
from tests.support.against_plain import assert_equal
from tests.support.lanes import OfStep, differing
from tests.support.meshes import HYBRID, REPLICATED
from tests.support.models import (
    FLAGS,
    RESHARD,
    Block,
    Net,
    Trace,
    backward,
    build,
    data,
    each_policy,
    grads_of,
    plain_net,
    same,
    same_trace,
    train,
    train_unsharded,
    update,
    whole_grads,
)
from tests.support.plain_layers import error
from tests.support.ranks import of_all_ranks, on_ranks

FP32, BF16 = Precision(), Precision(compute=torch.bfloat16)
STRATEGIES = {
    "zero3": {},
    "zero2": {"reshard_after_forward": False},
    "replicated": REPLICATED,
    "zero3, every microbatch": {"grad_sync": "every"},
    "zero2, every microbatch": {"grad_sync": "every", "reshard_after_forward": False},
}
STRATEGIES |= {f"hybrid {name}": {**it, **HYBRID} for name, it in STRATEGIES.items() if "mesh" not in it}
# Each strategy in both precisions, on two ranks and on four where that is possible; those in bf16 on four
# ranks alone where four are needed.
RUNS = [
    (4 if "hybrid" in name or (number % 2 and precision == FP32) else 2, name, precision)
    for number, name in enumerate(STRATEGIES)
    for precision in (FP32, BF16)
]
ALL_TRUE = {"losses": True, "grads": True, "parameters": True, "optimizer": True}


@pytest.mark.parametrize(("world_size", "strategy", "precision"), RUNS)
@on_ranks()
def test_flag_on_equals_flag_off(rank: int, world_size: int, strategy: str, precision: Precision) -> None:
    options = {"precision": precision, **STRATEGIES[strategy]}
    models = [build(optimize_backward_concat=flag, **options) for flag in (False, True)]
    off, on = (train(model, rank) for model in models)
    assert same_trace(off, on) == ALL_TRUE
    if precision == FP32:
        assert_equals_the_unsharded_model(models[1], on, rank, world_size)


def assert_equals_the_unsharded_model(model: Any, trace: Trace, rank: int, world_size: int) -> None:
    losses, state = train_unsharded(world_size)
    if rank == 0:
        torch.testing.assert_close(torch.stack(trace.losses), torch.stack(losses), rtol=1e-6, atol=0)
    ours = model.state_dict()
    assert list(ours) == list(state)
    torch.testing.assert_close(ours, state, rtol=1e-4, atol=1e-6)
    assert all(error(ours[name], expected) < 1e-6 for name, expected in state.items())


@FLAGS
@RESHARD
@pytest.mark.parametrize("sent", [torch.float32, torch.bfloat16], ids=["FP32 sent", "bf16 sent"])
@on_ranks(2)
def test_the_order_of_sums_is_written_down(rank: int, sent: torch.dtype, reshard: bool, flag: bool) -> None:
    """Over microbatches, then ranks, or over ranks, then microbatches: one process has the same bits."""
    net = plain_net()
    names, parameters = zip(*net.named_parameters(), strict=True)
    of_ranks = [
        [torch.autograd.grad(net(tokens), parameters) for tokens in next(data(owner, 1, 3))]
        for owner in range(2)
    ]
    options = {"reshard_after_forward": reshard, "optimize_backward_concat": flag}

    def mean(*grads: Sequence[Tensor]) -> list[Tensor]:
        """The mean of both ranks, in the dtype that is sent; two numbers have one sum in any order."""
        return [(a.to(sent) + b.to(sent)).div_(2).float() for a, b in zip(*grads, strict=True)]

    for sync, expected in (
        ("last", mean(*(reduce(added, grads) for grads in of_ranks))),
        ("every", reduce(added, map(mean, *of_ranks))),
    ):
        model = build(grad_sync=sync, precision=Precision(reduce=sent), **options)
        backward(model, next(data(rank, 1, 3)))
        assert_equal(whole_grads(model), dict(zip(names, expected, strict=True)))


def added(first: Sequence[Tensor], second: Sequence[Tensor]) -> list[Tensor]:
    return [a + b for a, b in zip(first, second, strict=True)]


@pytest.mark.parametrize("flag", [False, True])
@pytest.mark.parametrize("depth", [0, 1, 2])
@on_ranks(2)
def test_nothing_reads_a_freed_buffer(rank: int, depth: int, flag: bool) -> None:
    options = {"prefetch": Prefetch(depth, depth), "optimize_backward_concat": flag, "precision": BF16}
    plain, poisoned = (
        train(build(debug=Debug(poison_on_free=poison), **options), rank) for poison in (False, True)
    )
    assert same_trace(plain, poisoned) == ALL_TRUE


# ---- hybrid sharding: inside each row of a (replicate, shard) mesh ---------------------------------------


@each_policy
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("sync", ["last", "every"])
@on_ranks(4)
def test_bytes_inside_and_across(rank: int, sync: str, count: int, policy: Any) -> None:
    """A padded parameter of P elements in FP32, on a 2 x 2 mesh.

    Inside a row, reduce-scatter sends (2 - 1) / 2 of 4 bytes in each reducing backward.  Across rows, the
    all-reduce of the half that a rank holds sends 2 (2 - 1) / 2 of 4 / 2 bytes, once a step, whatever the
    number of microbatches.
    """
    model = build(grad_sync=sync, **HYBRID, **policy)
    ((*batches,),) = data(rank, 1, count)
    backward(model, batches)
    model.zero_grad()
    ledger = model.fsdp_state.shared.ledger
    ledger.reset()
    backward(model, batches)
    padded = sum(group.layout.padded_numel(2) for _, group in named_groups(model))
    backwards = count if sync == "every" else 1
    assert ledger.bytes["reduce"] / padded == pytest.approx(2.0 * backwards)
    assert ledger.bytes["all_reduce"] / padded == pytest.approx(2.0)


@FLAGS
@on_ranks(4)
def test_an_unfinished_step_leaves_no_partial_sum(rank: int, flag: bool) -> None:
    """Gradients that an unfinished step had reduced inside a row do not reach the next step."""
    options = {**HYBRID, "grad_sync": "every", "optimize_backward_concat": flag}
    model, fresh = build(**options), build(**options)
    unfinished, clean = data(rank, 2, 2)
    for tokens in microbatches(model, unfinished):
        model(tokens).backward()
        break
    for m in (model, fresh):
        backward(m, clean)
    assert same(grads_of(model), grads_of(fresh))
    with model.no_sync():
        model(clean[0]).backward()
    model.zero_grad()
    fresh.zero_grad()
    for m in (model, fresh):
        backward(m, clean)
    assert same(grads_of(model), grads_of(fresh))


@on_ranks(4)
def test_replicas_hold_equal_shards(rank: int) -> None:
    """Replicas that start from different weights, and ranks that train on different data."""
    model = build(seed=rank // 2, **HYBRID)
    train(model, rank)
    shards = of_all_ranks(torch.cat([p.detach() for p in model.parameters()]))
    assert torch.equal(shards[0], shards[2]) and torch.equal(shards[1], shards[3])
    assert not torch.equal(shards[0], shards[1])


# ---- when gradients are reduced: memory, and the choice of "auto" ----------------------------------------


COUNT = 3


@on_ranks(2)
def test_every_has_the_bits_of_lanes_in_blocks(rank: int) -> None:
    """One microbatch a lane, and a block of what all ranks run at a time: the same sums."""
    every, last, lanes = build(grad_sync="every"), build(), build(lanes=Lanes(2 * COUNT, block=2))
    # Half of a loss, which is exact: gradients of lanes are added where others are averaged.
    for model, share in ((every, every), (last, last), (lanes, OfStep(lanes, 2))):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for batches in data(rank, 2, COUNT):
            backward(share, batches)
            update(optimizer)
    assert differing(lanes.state_dict(), every.state_dict()) == []
    assert differing(last.state_dict(), every.state_dict()), "the last microbatch adds in another order"


@RESHARD
@on_ranks(2)
def test_three_units_have_gradients_at_a_time(
    rank: int, reshard: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = shard(
        plain_net(partial(Net, 8)), by_class(Block), grad_sync="every", reshard_after_forward=reshard
    )
    alive: weakref.WeakSet[Tensor] = weakref.WeakSet()
    most, allocate = [0], MainGrad._allocate

    def counted(main_grad: MainGrad) -> None:
        allocate(main_grad)
        assert main_grad.tensor is not None
        alive.add(main_grad.tensor)
        most.append(len(alive))

    monkeypatch.setattr(MainGrad, "_allocate", counted)
    (batches,) = data(rank, 1, COUNT)
    # Those of the last two units are reduced in the next microbatch, before activations are at their most.
    late: list[int] = []
    model.blocks[-1].register_forward_pre_hook(lambda *_: late.append(len(alive)))
    for tokens in microbatches(model, batches):
        model(tokens).backward()
        assert len(alive) == (0 if tokens is batches[-1] else 2)
    assert late == [0] * COUNT
    assert max(most) <= 3
    (row,) = [row for row in model.memory_report().rows if row.buffer == "main_grad"]
    assert row.at_a_time < row.total / 2


def chooses_every(memory: float, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether "auto" is "every" on a GPU with this memory."""
    monkeypatch.setattr(grad_sync, "memory_of", lambda _device: memory)
    model = build(grad_sync="auto")
    model.memory_report()
    is_every: bool = model.fsdp_state.shared.reduces_every
    return is_every


@on_ranks(2)
def test_auto_chooses_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    model, said = build(), list[str]()
    monkeypatch.setattr(grad_sync.logger, "warning", lambda text, *values: said.append(text % values))
    # AdamW's two moments are counted before there is an optimizer.
    needed = model.memory_report().peak + 2 * 4 * sum(p.numel() for p in model.parameters())
    for hosts_of, share in (("2", 0.6), ("1", 0.75)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", hosts_of)
        assert chooses_every(needed / share * 0.99, monkeypatch)
        assert not chooses_every(needed / share * 1.01, monkeypatch)
    assert ["'every'" in text for text in said] == [True, False] * 2
    monkeypatch.undo()
    # The memory of a CPU is not known.
    model = build(grad_sync="auto")
    model.memory_report()
    assert not model.fsdp_state.shared.reduces_every


@on_ranks(2)
def test_ranks_whose_gpus_differ(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        RuntimeError, match=r"has chosen 'every'; if GPUs have different memory, choose yourself"
    ):
        chooses_every(1.0 if rank else 1e12, monkeypatch)


def test_auto_with_lanes() -> None:
    with pytest.raises(ValueError, match='leave out grad_sync="auto"'):
        Policy(Precision(), grad_sync="auto", lanes=2)
