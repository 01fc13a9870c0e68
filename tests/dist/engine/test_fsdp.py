"""FlatFSDP as a module: state dicts, clipping, unusual parameters, errors, labels."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.profiler import profile

from flatfsdp import FlatFSDP, FlattenParamsWrapper, Precision, auto_wrap, by_class, by_size
from flatfsdp.engine.whole.units import named_groups
from flatfsdp.parallel import make_mesh
from tests.support.meshes import REPLICATED, replicating
from tests.support.models import (
    FLAGS,
    Block,
    Net,
    Skipping,
    backward,
    data,
    each_policy,
    grads_of,
    plain_net,
    same_trace,
    train,
)
from tests.support.models import wrapped as build
from tests.support.ranks import of_all_ranks, on_ranks

# ---- state dicts ----------------------------------------------------------------------------------------


@FLAGS
@on_ranks(2, 4)
def test_state_dict_has_original_names_and_master_precision(rank: int, flag: bool) -> None:
    expected = plain_net().state_dict()
    options = {"optimize_backward_concat": flag, "precision": Precision(compute=torch.bfloat16)}
    model = build(**options)
    state = model.state_dict()
    assert list(state) == list(expected)
    assert all(torch.equal(state[name], expected[name]) for name in expected), (
        "master precision, original names"
    )

    batches = next(data(rank, 1, 3))
    with model.no_sync():
        model(batches[0]).backward()
    between = model.state_dict()
    assert all(torch.equal(between[name], expected[name]) for name in expected), "between microbatches"
    model(batches[1]).backward()

    other = build(seed=1, **options)
    assert not torch.equal(other.state_dict()["head.weight"], state["head.weight"])
    assert not any(other.load_state_dict(state))
    again = other.state_dict()
    assert all(torch.equal(again[name], expected[name]) for name in expected)
    assert torch.equal(other(batches[2]), model(batches[2])), (
        "loaded weights are used, not gathered earlier ones"
    )

    child = other.blocks[1].state_dict()
    assert list(child) == [n.removeprefix("blocks.1.") for n in expected if n.startswith("blocks.1.")]


@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": False}, REPLICATED], ids=str)
@on_ranks(2)
def test_training_goes_on_from_a_state_dict(rank: int, options: dict[str, Any]) -> None:
    """A model loaded from a state dict continues exactly like the one it was saved from."""
    options = {"optimize_backward_concat": True, **options}
    model = build(**options)
    train(model, rank)
    state = model.state_dict()
    loaded = build(seed=7, **options)
    loaded.load_state_dict(state)
    equal = same_trace(train(model, rank), train(loaded, rank))
    assert all(equal.values()), equal


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


# ---- gradient norm --------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
@pytest.mark.parametrize("options", [{}, REPLICATED], ids=str)
@on_ranks(2)
def test_clip_grad_norm_sees_all_ranks(rank: int, options: Any, norm_type: float) -> None:
    model = build(optimize_backward_concat=True, **options)
    backward(model, next(data(rank, 1, 2)))
    before = grads_of(model)
    pieces = of_all_ranks(torch.cat(before))
    expected = torch.linalg.vector_norm(torch.cat(pieces[:1] if options else pieces), norm_type)
    norm = model.clip_grad_norm_(0.1, norm_type)
    torch.testing.assert_close(norm, expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(grads_of(model), [grad * (0.1 / (expected + 1e-6)) for grad in before])
    for shard in model.parameters():
        shard.grad.fill_(torch.nan)
    with pytest.raises(RuntimeError, match="norm is nan"):
        model.clip_grad_norm_(1.0, norm_type, error_if_nonfinite=True)


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


@on_ranks(2)
def test_a_layer_skipped_on_one_rank_pairs_the_right_reductions(rank: int, world_size: int) -> None:
    plain, net = plain_net(Skipping), plain_net(Skipping)
    model = auto_wrap(net, by_class(Block), mesh=replicating())
    plain.skips = net.skips = 1 if rank == 1 else -1
    tokens = next(data(0, 1, 1))[0]
    model(tokens).backward()
    plain(tokens).backward()
    for ours, theirs in zip(grads_of(model), plain.parameters(), strict=True):
        grad = torch.zeros_like(theirs) if theirs.grad is None else theirs.grad
        dist.all_reduce(grad)
        torch.testing.assert_close(ours, grad.flatten() / world_size)


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


@on_ranks(4)
def test_meshes(rank: int) -> None:
    """(replicate, shard) on a 2 x 2 mesh gives what sharding over all four gives."""
    one = init_device_mesh("cpu", (4,))
    two = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    results = []
    for mesh in (one, two):
        model = build(mesh=mesh, optimize_backward_concat=True)
        train(model, rank)
        results.append(model.state_dict())
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-6)
    off = train(build(mesh=two), rank)
    on = train(build(mesh=two, optimize_backward_concat=True), rank)
    assert all(same_trace(off, on).values())


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
def test_replicas_start_from_the_first_rank(rank: int, world_size: int) -> None:
    model = build(seed=rank, **REPLICATED)
    loss = model(next(data(0, 1, 1))[0])
    assert len({value.item() for value in of_all_ranks(loss.detach())}) == 1


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
