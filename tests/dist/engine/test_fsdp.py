"""FlatFSDP as a module: state dicts, clipping, unusual parameters, errors, labels."""

from __future__ import annotations

import cProfile
import pstats
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.profiler import profile

from flatfsdp import FlatFSDP, FlattenParamsWrapper, Precision, auto_wrap, by_class, by_size, shard
from flatfsdp.engine.whole.units import named_groups
from flatfsdp.parallel import make_mesh
from tests.support.models import (
    Block,
    Net,
    backward,
    data,
    each_policy,
    grads_of,
    plain_net,
    train,
)
from tests.support.models import wrapped as build
from tests.support.ranks import on_ranks

# ---- state dicts ----------------------------------------------------------------------------------------


@on_ranks(4)
def test_loading_reaches_ranks_that_hold_only_padding() -> None:
    """The last rank's shard is all padding, so that loading writes nothing there."""
    model = FlatFSDP(nn.Linear(4, 4), reshard_after_forward=False, optimize_backward_concat=True)
    x = torch.ones(2, 4)
    model(x)
    state = model.state_dict()
    model.load_state_dict({name: value + 1 for name, value in state.items()})
    expected = x @ (state["weight"] + 1).t() + state["bias"] + 1
    torch.testing.assert_close(model(x).detach(), expected, rtol=1e-5, atol=1e-5)


# ---- unusual parameters ---------------------------------------------------------------------------------


class Odd(nn.Module):
    """Frozen at the bottom and in between, tied weights, a parameter nobody uses, a nested output."""

    def __init__(self) -> None:
        super().__init__()
        self.bottom = nn.Linear(8, 8)
        self.bottom.requires_grad_(False)
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)
        self.second.weight = self.first.weight
        self.frozen_scale = nn.Parameter(torch.full((8,), 2.0), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        y = self.second(torch.tanh(self.first(self.bottom(x)))) * self.frozen_scale
        return {"outputs": [y], "name": "odd"}


class OddNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Odd()
        self.twice = nn.Linear(8, 8)
        self.tower = nn.Linear(8, 8)
        self.tower.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(self.twice(x))["outputs"][0]
        return self.tower(self.twice(y)).square().mean()


@each_policy
@on_ranks(2)
def test_frozen_tied_unused_and_twice_used_parameters(rank: int, world_size: int, policy: Any) -> None:
    plain, sharded = plain_net(OddNet), plain_net(OddNet)
    for name in ("inner", "twice", "tower"):
        setattr(sharded, name, FlatFSDP(getattr(sharded, name), **policy))
    model = FlatFSDP(sharded, **policy)
    generator = torch.Generator().manual_seed(3)
    batches = [[torch.randn(4, 8, generator=generator) for _ in range(world_size)] for _ in range(2)]
    backward(model, [per_rank[rank] for per_rank in batches])
    for per_rank in batches:
        for x in per_rank:
            (plain(x) / world_size).backward()
    for each in (model, plain):
        torch.optim.SGD([p for p in each.parameters() if p.requires_grad], lr=0.1).step()
    ours, theirs = model.state_dict(), plain.state_dict()
    assert list(ours) == list(theirs)
    torch.testing.assert_close(ours, theirs)
    tied = sharded.inner.module
    if policy["optimize_backward_concat"]:
        assert tied.first.weight is tied.second.weight


# ---- errors ---------------------------------------------------------------------------------------------


TOKENS = torch.zeros(1, 2, dtype=torch.long)


def tied_across_units() -> None:
    net = Net()
    net.blocks[1].up.weight = net.blocks[0].up.weight
    auto_wrap(net, by_class(Block))


def tied_through_a_module() -> None:
    net = Net()
    net.blocks[1].up = net.blocks[0].up
    auto_wrap(net, by_class(Block))


def tied_and_wrapped_by_size() -> None:
    net = Net()
    net.head.weight = net.embedding.weight
    auto_wrap(net, by_size(20))


def sparse_gradient() -> None:
    net = Net()
    net.embedding = nn.Embedding(30, 20, sparse=True)
    auto_wrap(net, by_class(Block))(TOKENS).backward()


def integer_parameter() -> None:
    net = nn.Linear(2, 2)
    net.register_parameter("table", nn.Parameter(torch.zeros(3, dtype=torch.int32), requires_grad=False))
    FlatFSDP(net)


def sparse_parameter() -> None:
    net = nn.Linear(2, 2)
    net.weight = nn.Parameter(torch.eye(2).to_sparse())
    FlatFSDP(net)


@pytest.mark.parametrize(
    ("case", "error", "message"),
    [
        (tied_across_units, ValueError, r"up\.weight is tied to up\.weight, which another FlatFSDP unit"),
        (sparse_gradient, TypeError, r"embedding\.weight got a torch\.sparse_coo gradient"),
        (integer_parameter, ValueError, r"parameter table is torch\.int32"),
        (sparse_parameter, ValueError, r"parameter weight is a torch\.sparse_coo tensor; .* plain dense"),
        (lambda: FlatFSDP(nn.LazyLinear(2)), ValueError, "weight gets its shape in the first forward"),
        (lambda: FlatFSDP(nn.Linear(2, 2, device="meta")), ValueError, "weight is on the meta device"),
        (lambda: FlatFSDP(FlattenParamsWrapper(nn.Linear(2, 2))), ValueError, "is a FlattenParamsWrapper"),
        (tied_through_a_module, ValueError, r"up\.\w+ is tied to up\.\w+, which another FlatFSDP unit"),
        (tied_and_wrapped_by_size, ValueError, "^head: parameter weight is tied to weight, which another"),
        (lambda: FlatFSDP(nn.Linear(2, 2).double()), ValueError, r"weight is float64.*with float64 as param"),
        (lambda: FlatFSDP("model"), TypeError, "takes a module"),
        (lambda: FlatFSDP(nn.Linear(2, 2), precision=torch.half), TypeError, r"pass Precision\("),
        (lambda: FlatFSDP(nn.Linear(2, 2), prefetch=0), TypeError, r"pass Prefetch\("),
        (lambda: auto_wrap(Net(), Block), TypeError, r"pass by_class\("),
        (lambda: FlatFSDP(nn.Linear(2, 2), grad_sync="never"), ValueError, "grad_sync is 'never'"),
        (lambda: auto_wrap(Net(), by_class(nn.Conv2d)), ValueError, "picked no module"),
        (lambda: by_class(3), ValueError, "nn.Module classes"),
        (lambda: by_size(0), ValueError, "positive number"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_errors_name_the_cause_and_the_fix(case: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        case()


def test_second_derivatives_raise() -> None:
    loss = FlatFSDP(nn.Linear(2, 2))(torch.ones(1, 2)).square().sum()
    with pytest.raises(RuntimeError, match="create_graph=True"):
        loss.backward(create_graph=True)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("shape", "up.weight [60, 20] at 64] where rank 1 has [blocks.1: trained up.weight [61, 20]"),
        ("unit", "rank 1 has [blocks.3: trained"),
        ("policy", "reshard_after_forward=False"),
    ],
    ids=["shape", "unit", "policy"],
)
@on_ranks(2)
def test_a_mismatch_raises_on_every_rank_at_once(rank: int, what: str, message: str) -> None:
    net, options = Net(), {}
    if rank == 1 and what == "shape":
        net.blocks[1].up = nn.Linear(20, 61)
    if rank == 1 and what == "unit":
        net.blocks.append(Block())
    if rank == 1 and what == "policy":
        options["reshard_after_forward"] = False
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=re.escape(message)):
        auto_wrap(net, by_class(Block), **options)(TOKENS)
    assert time.monotonic() - start < 20  # and not the 30 of the process group


# ---- wrapping, meshes, labels ---------------------------------------------------------------------------


def test_auto_wrap_by_size_and_by_callable() -> None:
    model = auto_wrap(Net(), by_size(2000))
    assert [isinstance(b, FlatFSDP) for b in model.blocks] == [True] * 3
    assert not isinstance(model.module.blocks, FlatFSDP)
    model = auto_wrap(Net(), lambda name, module, numel: name in ("blocks.1", "head"))
    assert [isinstance(b, FlatFSDP) for b in model.blocks] == [False, True, False]
    assert isinstance(model.head, FlatFSDP)
    assert len(named_groups(model)) == 3


def test_a_module_with_two_paths_becomes_one_unit() -> None:
    net = Net()
    net.blocks[2] = net.blocks[0]
    model = auto_wrap(net, by_class(Block))
    assert model.blocks[0] is model.blocks[2]
    model(TOKENS).backward()
    assert len(named_groups(model)) == 3
    # Listed once, under its first name, as in the plain model.
    assert len(grads_of(model)) == len(list(Net(2).parameters()))


@on_ranks(2)
def test_a_wrong_mesh_is_named_before_anything_is_sent(rank: int) -> None:
    pair = init_device_mesh("cpu", (2,))
    cases: list[tuple[Any, type[Exception], str]] = [
        (dist.group.WORLD, TypeError, r"mesh is a ProcessGroup; .*DeviceMesh\.from_group\(group, 'cuda'\)"),
        (make_mesh(), TypeError, r"mesh is a ParallelMesh; .*make_mesh\(\.\.\.\)\.dp"),
        (init_device_mesh("cpu", (1, 1, 2)), ValueError, r"mesh has 3 dimensions; pass \(shard,\) or"),
    ]
    if rank == 1:
        alone = DeviceMesh("cpu", [0], _init_backend=False)
        cases.append((alone, ValueError, r"rank 1 is not in mesh, ranks \[0\]"))
    for mesh, error, message in cases:
        with pytest.raises(error, match=message):
            build(mesh=mesh)
    train(build(mesh=pair), rank)


@on_ranks(2)
def test_the_profiler_shows_unit_microbatch_and_bytes(rank: int) -> None:
    model = build(optimize_backward_concat=True, precision=Precision(compute=torch.bfloat16))
    batches = next(data(rank, 1, 2))
    with torch.no_grad():  # ranks compare what they begin with
        model(batches[0])
    with profile() as trace:
        backward(model, batches)
    names = [event.name for event in trace.events()]
    assert not any(n.startswith("aten::cat") or "SplitWithSizes" in n for n in names)
    assert "flatfsdp.all_gather blocks.0 mb=0 bytes=2560" in names
    assert any(n.startswith("flatfsdp.cast blocks.0 mb=0") for n in names)
    reduced = [n.split()[1:3] for n in names if n.startswith("flatfsdp.reduce_scatter")]
    assert reduced == [[unit, "mb=1"] for unit in ("blocks.2", "blocks.1", "blocks.0", "root")]


# ---- the work grows with the number of parameters, not with its square -----------------------------------


def calls_in_flatfsdp(function: Callable[..., Any], *args: Any) -> int:
    """How many calls of our functions it takes."""
    profile = cProfile.Profile()
    profile.runcall(function, *args)
    stats = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    return sum(row[1] for (file, _, _), row in stats.items() if "flatfsdp" in file)


def layers(parameters: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(2, 2) for _ in range(parameters // 2)))


@pytest.mark.parametrize("does", ["shard", "load"])
def test_twice_the_parameters_are_twice_the_work(does: str) -> None:
    work = []
    for parameters in (100, 200):
        module = layers(parameters)
        state = module.state_dict()
        if does == "load":
            module = shard(module)
            module(torch.ones(1, 2))
            work.append(calls_in_flatfsdp(module.load_state_dict, state))
        else:
            work.append(calls_in_flatfsdp(shard, module))
    assert work[1] < 2.2 * work[0]
