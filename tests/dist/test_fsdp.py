"""FlatFSDP as a module: state dicts, clipping, unusual parameters, errors, labels."""

from __future__ import annotations

import copy
import pickle
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import profile
from torch.utils.checkpoint import checkpoint

from flatfsdp import FlatFSDP, FlattenParamsWrapper, Precision, auto_wrap, by_class, by_size, microbatches
from tests.dist.models import Block, Net, build, data, grads_of, same, same_trace, train
from tests.dist.ranks import RankFailure, run_ranks

FLAGS = pytest.mark.parametrize("flag", [False, True], ids=["off", "on"])


# ---- state dicts ----------------------------------------------------------------------------------------


def state_dict_round_trip(rank: int, world_size: int, flag: bool) -> None:
    torch.manual_seed(0)
    plain = Net()
    expected = copy.deepcopy(plain.state_dict())
    options = {"optimize_backward_concat": flag, "precision": Precision(compute=torch.bfloat16)}
    model = auto_wrap(plain, by_class(Block), **options)
    state = model.state_dict()
    assert list(state) == list(expected)
    assert all(torch.equal(state[name], expected[name]) for name in expected), "master precision, original names"

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
    assert torch.equal(other(batches[2]), model(batches[2])), "loaded weights are used, not gathered earlier ones"

    child = other.blocks[1].state_dict()
    assert list(child) == [n.removeprefix("blocks.1.") for n in expected if n.startswith("blocks.1.")]


@FLAGS
@pytest.mark.parametrize("world_size", [2, 4])
def test_state_dict_has_original_names_and_master_precision(world_size: int, flag: bool) -> None:
    run_ranks(world_size, state_dict_round_trip, flag)


def resume(rank: int, world_size: int, options: dict[str, Any]) -> dict[str, bool]:
    """A model loaded from a state dict trains on exactly as the one it was saved from."""
    model = build(**options)
    train(model, rank)
    state = model.state_dict()
    loaded = build(seed=7, **options)
    loaded.load_state_dict(state)
    return same_trace(train(model, rank), train(loaded, rank))


@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": False}, {"shard": False}], ids=str)
def test_training_goes_on_from_a_state_dict(options: dict[str, Any]) -> None:
    assert all(all(r.values()) for r in run_ranks(2, resume, {"optimize_backward_concat": True, **options}))


def bad_state_dict(rank: int, world_size: int) -> list[str]:
    model = build()
    state = model.state_dict()
    messages = []
    for break_it in (
        lambda s: s.pop("blocks.1.up.weight"),
        lambda s: s.update({"blocks.1.up.weight": torch.zeros(3)}),
        lambda s: s.update({"blocks.1.extra": torch.zeros(3)}),
    ):
        broken = dict(state)
        break_it(broken)
        with pytest.raises(RuntimeError) as error:
            model.load_state_dict(broken)
        messages.append(str(error.value))
    return messages


def test_a_wrong_state_dict_names_the_parameter_on_every_rank() -> None:
    for missing, wrong_shape, unexpected in run_ranks(2, bad_state_dict):
        assert "Missing key" in missing
        assert '"blocks.1.up.weight"' in missing
        assert "size mismatch for blocks.1.up.weight" in wrong_shape
        assert '"blocks.1.extra"' in unexpected


# ---- gradient norm --------------------------------------------------------------------------------------


def clip(rank: int, world_size: int, options: dict[str, Any], norm_type: float) -> None:
    model = build(optimize_backward_concat=True, **options)
    for tokens in microbatches(model, next(data(rank, 1, 2))):
        model(tokens).backward()
    full = []
    for shard in model.parameters():
        pieces = [torch.empty_like(shard.grad) for _ in range(world_size)]
        dist.all_gather(pieces, shard.grad)
        full += pieces if options.get("shard", True) else pieces[:1]
    expected = torch.linalg.vector_norm(torch.cat(full), norm_type)
    before = grads_of(model)
    norm = model.clip_grad_norm_(0.1, norm_type)
    torch.testing.assert_close(norm, expected)
    for clipped, grad in zip(grads_of(model), before, strict=True):
        torch.testing.assert_close(clipped, grad * (0.1 / (expected + 1e-6)))
    for shard in model.parameters():
        shard.grad.fill_(torch.nan)
    with pytest.raises(RuntimeError, match="norm is nan"):
        model.clip_grad_norm_(1.0, norm_type, error_if_nonfinite=True)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
@pytest.mark.parametrize("options", [{}, {"shard": False}], ids=str)
def test_clip_grad_norm_sees_all_ranks(options: dict[str, Any], norm_type: float) -> None:
    run_ranks(2, clip, options, norm_type)


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


def odd_parameters(rank: int, world_size: int, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    plain = OddNet()
    sharded = copy.deepcopy(plain)
    for name in ("inner", "twice", "tower"):
        setattr(sharded, name, FlatFSDP(getattr(sharded, name), **options))
    model = FlatFSDP(sharded, **options)
    generator = torch.Generator().manual_seed(3)
    batches = [[torch.randn(4, 8, generator=generator) for _ in range(world_size)] for _ in range(2)]
    for mine in microbatches(model, [per_rank[rank] for per_rank in batches]):
        model(mine).backward()
    for per_rank in batches:
        for x in per_rank:
            (plain(x) / world_size).backward()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    reference = torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], lr=0.1)
    optimizer.step()
    reference.step()
    ours, theirs = model.state_dict(), plain.state_dict()
    assert list(ours) == list(theirs)
    for name in theirs:
        torch.testing.assert_close(ours[name], theirs[name], msg=name)
    tied = sharded.inner.module
    if options["optimize_backward_concat"]:
        assert tied.first.weight is tied.second.weight


@FLAGS
@pytest.mark.parametrize("reshard", [True, False])
def test_frozen_tied_unused_and_twice_used_parameters(flag: bool, reshard: bool) -> None:
    options = {"optimize_backward_concat": flag, "reshard_after_forward": reshard, "poison_on_free": True}
    run_ranks(2, odd_parameters, options)


class SkipsOnOneRank(Net):
    """Rank 1 never runs the middle block."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for index, block in enumerate(self.blocks):
            if not (index == 1 and dist.get_rank() == 1):
                x = block(x)
        return self.head(x).square().mean()


def skip(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    plain = SkipsOnOneRank()
    model = auto_wrap(copy.deepcopy(plain), by_class(Block), shard=False, optimize_backward_concat=True)
    tokens = next(data(0, 1, 1))[0]
    model(tokens).backward()
    plain(tokens).backward()
    for block, wrapped in zip(plain.blocks, model.blocks, strict=True):
        grad = torch.cat([torch.zeros(0) if p.grad is None else p.grad.flatten() for p in block.parameters()])
        if grad.numel() == 0:
            grad = torch.zeros(sum(p.numel() for p in block.parameters()))
        dist.all_reduce(grad)
        ours = torch.cat([wrapped.flat_param.grad[s.offset : s.end] for s in wrapped._unit.trained.layout.slots])
        torch.testing.assert_close(ours, grad / world_size)


def test_a_layer_skipped_on_one_rank_pairs_the_right_reductions() -> None:
    run_ranks(2, skip)


# ---- errors ---------------------------------------------------------------------------------------------


def tied_across_units() -> None:
    net = Net()
    net.blocks[1].up.weight = net.blocks[0].up.weight
    auto_wrap(net, by_class(Block))


def tied_through_a_module() -> None:
    net = Net()
    net.blocks[1].up = net.blocks[0].up
    auto_wrap(net, by_class(Block))


def sparse_gradient() -> None:
    net = Net()
    net.embedding = nn.Embedding(30, 20, sparse=True)
    auto_wrap(net, by_class(Block), optimize_backward_concat=True)(torch.zeros(1, 2, dtype=torch.long)).backward()


def integer_parameter() -> None:
    net = nn.Linear(2, 2)
    net.register_parameter("table", nn.Parameter(torch.zeros(3, dtype=torch.int32), requires_grad=False))
    FlatFSDP(net)


@pytest.mark.parametrize(
    ("case", "error", "message"),
    [
        (tied_across_units, ValueError, r"up\.weight is tied to up\.weight, which another FlatFSDP unit"),
        (sparse_gradient, TypeError, r"embedding\.weight got a torch\.sparse_coo gradient"),
        (integer_parameter, ValueError, r"parameter table is torch\.int32"),
        (lambda: FlatFSDP(nn.Linear(2, 2, device="meta")), ValueError, "parameter weight is on the meta device"),
        (lambda: FlatFSDP(FlattenParamsWrapper(nn.Linear(2, 2))), ValueError, "the module is a FlattenParamsWrapper"),
        (tied_through_a_module, ValueError, r"up\.\w+ is tied to up\.\w+, which another FlatFSDP unit"),
        (lambda: FlatFSDP("model"), TypeError, "wraps an nn.Module"),
        (lambda: FlatFSDP(nn.Linear(2, 2), precision=torch.bfloat16), TypeError, r"pass Precision\(compute="),
        (lambda: FlatFSDP(nn.Linear(2, 2), prefetch=0), TypeError, r"pass Prefetch\(forward="),
        (lambda: auto_wrap(Net(), Block), TypeError, r"pass by_class\("),
        (lambda: FlatFSDP(nn.Linear(2, 2), grad_sync="never"), ValueError, "grad_sync is 'never'"),
        (lambda: FlatFSDP(nn.Linear(2, 2)).double(), TypeError, "pass device= and precision="),
        (lambda: copy.deepcopy(FlatFSDP(nn.Linear(2, 2))), TypeError, "cannot be copied"),
        (lambda: pickle.dumps(FlatFSDP(nn.Linear(2, 2))), TypeError, r"save its state_dict\(\)"),
        (lambda: auto_wrap(Net(), by_class(nn.Conv2d)), ValueError, "picked no module"),
        (lambda: by_class(3), ValueError, "nn.Module classes"),
        (lambda: by_size(0), ValueError, "positive number"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_errors_name_the_cause_and_the_fix(case: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        case()


def test_moving_to_where_it_already_is_changes_nothing() -> None:
    model = build()
    assert model.float() is model
    assert model.to("cpu") is model


def mismatch(rank: int, world_size: int, what: str) -> None:
    torch.manual_seed(0)
    net, options = Net(), {}
    if rank == 1 and what == "shape":
        net.blocks[1].up = nn.Linear(20, 61)
    if rank == 1 and what == "unit":
        net.blocks.append(Block())
    if rank == 1 and what == "policy":
        options["reshard_after_forward"] = False
    auto_wrap(net, by_class(Block), **options)(torch.zeros(1, 2, dtype=torch.long))


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("shape", "up.weight [60, 20] at 64] where rank 1 has [blocks.1: trained up.weight [61, 20]"),
        ("unit", "rank 1 has [blocks.3: trained"),
        ("policy", "reshard_after_forward=False"),
    ],
    ids=["shape", "unit", "policy"],
)
def test_a_mismatch_raises_on_every_rank_at_once(what: str, message: str) -> None:
    run_ranks(2, mismatch, "nothing")
    start = time.monotonic()
    with pytest.raises(RankFailure) as failure:
        run_ranks(2, mismatch, what)
    assert time.monotonic() - start < 10
    assert len(failure.value.errors) == 2
    assert all(error is not None and message in error for error in failure.value.errors)


# ---- wrapping, meshes, labels ---------------------------------------------------------------------------


def test_auto_wrap_by_size_and_by_callable() -> None:
    model = auto_wrap(Net(), by_size(2000))
    assert [isinstance(b, FlatFSDP) for b in model.blocks] == [True] * 3
    assert not isinstance(model.module.blocks, FlatFSDP)
    model = auto_wrap(Net(), lambda name, module, numel: name in ("blocks.1", "head"))
    assert [isinstance(b, FlatFSDP) for b in model.blocks] == [False, True, False]
    assert isinstance(model.head, FlatFSDP)
    assert len(list(model.parameters())) == 3


def test_a_module_with_two_paths_becomes_one_unit() -> None:
    net = Net()
    net.blocks[2] = net.blocks[0]
    model = auto_wrap(net, by_class(Block))
    assert model.blocks[0] is model.blocks[2]
    model(torch.zeros(1, 2, dtype=torch.long)).backward()
    assert len(grads_of(model)) == 3


def meshes(rank: int, world_size: int) -> None:
    """(replicate, shard) on a 2 x 2 mesh gives what sharding over all four gives."""
    one = init_device_mesh("cpu", (4,))
    two = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    results = []
    for mesh in (one, two):
        model = build(mesh=mesh, optimize_backward_concat=True)
        train(model, rank)
        results.append(model.state_dict())
    for name, value in results[0].items():
        torch.testing.assert_close(results[1][name], value, rtol=1e-4, atol=1e-6, msg=name)
    off = train(build(mesh=two), rank)
    on = train(build(mesh=two, optimize_backward_concat=True), rank)
    assert all(same_trace(off, on).values())
    with pytest.raises(ValueError, match="not both"):
        build(mesh=one, process_group=dist.group.WORLD)


def test_meshes() -> None:
    run_ranks(4, meshes)


def replicas(rank: int, world_size: int) -> None:
    model = build(seed=rank, shard=False)
    batches = next(data(0, 1, 1))
    losses = [torch.empty(()) for _ in range(world_size)]
    dist.all_gather(losses, model(batches[0]).detach())
    assert same(losses, [losses[0]] * world_size)


def test_replicas_start_from_the_first_rank() -> None:
    run_ranks(2, replicas)


def labels(rank: int, world_size: int) -> list[str]:
    model = build(optimize_backward_concat=True, precision=Precision(compute=torch.bfloat16))
    with profile() as trace:
        for tokens in microbatches(model, next(data(rank, 1, 2))):
            model(tokens).backward()
    names = [event.name for event in trace.events()]
    assert not any("cat" in n or "SplitWithSizes" in n for n in names if n.startswith("aten::cat") or "Split" in n)
    return [name for name in names if name.startswith("flatfsdp.")]


def test_the_profiler_shows_unit_microbatch_and_bytes() -> None:
    names = run_ranks(2, labels)[0]
    assert "flatfsdp.all_gather blocks.0 mb=0 bytes=2560" in names
    assert any(n.startswith("flatfsdp.cast blocks.0 mb=0") for n in names)
    assert [n.split()[1] for n in names if n.startswith("flatfsdp.reduce_scatter")] == [
        "blocks.2",
        "blocks.1",
        "blocks.0",
        "root",
    ]
    assert all("mb=1" in n for n in names if n.startswith("flatfsdp.reduce_scatter"))


# ---- found in review ------------------------------------------------------------------------------------


class DetachedUse(nn.Module):
    """All gradients of the weight land before the input's gradient, which needs the weight, is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight.detach() + torch.ones_like(x) * self.weight


class FrozenBelow(nn.Module):
    """A frozen layer under a trained one, called on two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(8, 8)
        self.frozen.requires_grad_(False)
        self.trained = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.trained(torch.tanh(self.frozen(x)))


class Twice(nn.Module):
    def __init__(self, unit: nn.Module, recompute: bool) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.unit = unit
        self.recompute = recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        for _ in range(2):
            y = checkpoint(self.unit, y, use_reentrant=True) if self.recompute else self.unit(y)
        return (y * self.unit(self.first(-x))).square().mean()


def against_plain(rank: int, world_size: int, unit: Any, recompute: bool, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    plain = Twice(unit(), recompute)
    sharded = copy.deepcopy(plain)
    sharded.unit = FlatFSDP(sharded.unit, **options)
    model = FlatFSDP(sharded, **options)
    x = torch.randn(4, 8)
    model(x).backward()
    plain(x).backward()
    optimizers = (torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=1.0) for m in (model, plain))
    for optimizer in optimizers:
        optimizer.step()
    ours = model.state_dict()
    for name, expected in plain.state_dict().items():
        torch.testing.assert_close(ours[name], expected, rtol=1e-4, atol=1e-5, msg=name)


@FLAGS
@pytest.mark.parametrize("poison", [False, True])
@pytest.mark.parametrize("recompute", [False, True], ids=["plain", "reentrant"])
@pytest.mark.parametrize("unit", [DetachedUse, FrozenBelow])
def test_parameters_stay_until_the_gradients_of_the_inputs_are_there(
    unit: Any, recompute: bool, poison: bool, flag: bool
) -> None:
    options = {"optimize_backward_concat": flag, "poison_on_free": poison}
    run_ranks(2, against_plain, unit, recompute, options)


def failing_last_backward(rank: int, world_size: int, flag: bool) -> None:
    """The last microbatch's backward fails after some units have been reduced."""
    torch.manual_seed(0)
    model = auto_wrap(Net(6), by_class(Block), optimize_backward_concat=flag)
    torch.manual_seed(0)
    fresh = auto_wrap(Net(6), by_class(Block), optimize_backward_concat=flag)
    failing, clean = data(rank, 2, 2)

    def fail(_grad: torch.Tensor) -> None:
        raise ZeroDivisionError

    def fail_in_backward(module: Any, inputs: Any, output: torch.Tensor) -> None:
        if model.microbatch.is_last:
            output.register_hook(fail)

    handle = model.blocks[0].up.register_forward_hook(fail_in_backward)
    step = (model(tokens).backward() for tokens in microbatches(model, failing))
    with pytest.raises(ZeroDivisionError):
        list(step)
    handle.remove()
    assert grads_of(model) == []
    for m in (model, fresh):
        for tokens in microbatches(m, clean):
            m(tokens).backward()
    assert same(grads_of(model), grads_of(fresh))


@FLAGS
def test_a_backward_that_fails_half_reduced_leaves_no_gradient(flag: bool) -> None:
    run_ranks(2, failing_last_backward, flag)


def eval_failure(rank: int, world_size: int) -> None:
    """An exception in an eval forward between microbatches loses nothing; nor does a child's zero_grad."""
    model, reference = build(optimize_backward_concat=True), build(optimize_backward_concat=True)
    first, second = next(data(rank, 1, 2))
    for m in (model, reference):
        with m.no_sync():
            m(first).backward()
        if m is model:
            with pytest.raises(IndexError), torch.no_grad():
                m(torch.full((1, 2), 999))
        m(second).backward()
    assert same(grads_of(model), grads_of(reference))
    with model.no_sync():
        model(first).backward()
    model.blocks[2].zero_grad()
    kept = [m._unit.trained.main_grad.is_allocated for m in (model, *model.blocks)]
    assert kept == [True, True, True, False]


def test_failed_evaluation_and_a_childs_zero_grad_leave_other_gradients_alone() -> None:
    run_ranks(2, eval_failure)


def load_with_padding(rank: int, world_size: int) -> None:
    """The last rank's shard is all padding, so that loading writes nothing there."""
    model = FlatFSDP(nn.Linear(4, 4), reshard_after_forward=False, optimize_backward_concat=True)
    x = torch.ones(2, 4)
    model(x)
    state = model.state_dict()
    model.load_state_dict({name: value + 1 for name, value in state.items()})
    torch.testing.assert_close(
        model(x).detach(), x @ (state["weight"] + 1).t() + state["bias"] + 1, rtol=1e-5, atol=1e-5
    )


def test_loading_reaches_ranks_that_hold_only_padding() -> None:
    run_ranks(4, load_with_padding)


def frozen_teacher(rank: int, world_size: int) -> None:
    """The usual moving-average idiom writes through `.data`, which no version counter sees."""
    teacher = nn.Linear(8, 8)
    teacher.requires_grad_(False)
    model = FlatFSDP(teacher, precision=Precision(compute=torch.bfloat16))
    with torch.no_grad():
        model(torch.ones(2, 8))
        for shard in model.parameters():
            shard.data.zero_().add_(1.0)
        assert (model(torch.ones(2, 8)) == 9.0).all()


def test_a_write_through_data_reaches_a_frozen_model() -> None:
    run_ranks(2, frozen_teacher)


def past_the_wrapper(rank: int, world_size: int) -> None:
    model = build()
    with pytest.raises(RuntimeError, match="forward of Block was called past its FlatFSDP"):
        model.blocks[0].module(torch.zeros(1, 20))
    model.requires_grad_(False)
    with pytest.raises(RuntimeError, match="requires_grad of unit root was changed after wrapping"):
        model(torch.zeros(1, 2, dtype=torch.long))


def test_calls_past_the_wrapper_and_late_freezing_raise() -> None:
    run_ranks(2, past_the_wrapper)


def user_hooks(rank: int, world_size: int, flag: bool) -> None:
    """A hook on a parameter runs before its gradient lands."""
    grads = []
    for factor in (1.0, 10.0):
        torch.manual_seed(0)
        net = Net()
        net.blocks[0].up.weight.register_hook(lambda g, factor=factor: g * factor)
        model = auto_wrap(net, by_class(Block), optimize_backward_concat=flag)
        model(next(data(rank, 1, 1))[0]).backward()
        grads.append(model.blocks[0].clip_grad_norm_(torch.inf))
    assert grads[1] > 2 * grads[0]


@FLAGS
def test_hooks_on_parameters_run_before_the_gradient_lands(flag: bool) -> None:
    run_ranks(2, user_hooks, flag)


def test_second_derivatives_raise() -> None:
    model = FlatFSDP(nn.Linear(2, 2), optimize_backward_concat=True)
    loss = model(torch.ones(1, 2)).square().sum()
    with pytest.raises(RuntimeError, match="create_graph=True"):
        loss.backward(create_graph=True)


def test_parameters_on_one_rank_can_be_read_before_the_first_forward() -> None:
    plain = nn.Linear(4, 4)
    expected = plain.weight.detach().bfloat16()
    model = FlatFSDP(plain, precision=Precision(compute=torch.bfloat16), optimize_backward_concat=True)
    assert torch.equal(model.weight, expected)


def test_an_opaque_output_of_the_root_can_be_differentiated() -> None:
    run_ranks(2, opaque_root)


class OpaqueNet(Net):
    def forward(self, tokens: torch.Tensor) -> Any:
        return type("Output", (), {"loss": super().forward(tokens)})()


def opaque_root(rank: int, world_size: int) -> None:
    tokens = next(data(rank, 1, 1))[0]
    grads = []
    for net in (Net, OpaqueNet):
        torch.manual_seed(0)
        model = auto_wrap(net(), by_class(Block), optimize_backward_concat=True, poison_on_free=True)
        output = model(tokens)
        (output if net is Net else output.loss).backward()
        grads.append(grads_of(model))
    assert same(*grads)
