"""Programs written for fairscale run on FlatFSDP after a change of import, and compute what they should.

On the CPU they run with ours and are compared with the plain model; on two GPUs they run with fairscale
itself as well, and all bits are compared.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.against_plain import assert_equal
from tests.support.fairscale_programs import (
    BUILDS,
    PLAIN,
    Build,
    State,
    automatically,
    by_hand,
    joined,
    local_files,
    made,
    names_of,
    optimizer_is_loaded,
    optimizer_is_saved,
    saved_and_loaded,
    summoned,
    tied_and_frozen,
    train_plain,
    trained,
)
from tests.support.models import VOCAB, WIDTH, data, plain_net
from tests.support.ranks import on_ranks, run_ranks

FLAGS = pytest.mark.parametrize("flag", [False, True], ids=["flag off", "flag on"])

# ---- training -------------------------------------------------------------------------------------------


def on_cpu(
    build: Build, options: dict[str, Any], world_size: int = 2, **loop: Any
) -> tuple[list[Tensor], State]:
    """Returns rank 0's results, after a check that all ranks end with the same model."""
    results = run_ranks(world_size, trained, "flatfsdp", "cpu", build, options, loop)
    for _, state in results[1:]:
        assert all(torch.equal(state[name], value) for name, value in results[0][1].items())
    return results[0]


def assert_close(
    found: tuple[list[Tensor], State], expected: tuple[list[Tensor], State], **tolerance: float
) -> None:
    assert list(found[1]) == list(expected[1])
    torch.testing.assert_close(found[1], expected[1], **tolerance)
    losses, theirs = ([loss.reshape(()) for loss in each[0]] for each in (found, expected))
    torch.testing.assert_close(losses, theirs, **tolerance)


@FLAGS
@pytest.mark.parametrize("build", BUILDS)
def test_trains_like_the_plain_model(build: Build, flag: bool) -> None:
    found = on_cpu(build, {"optimize_backward_concat": flag}, norm_type=2.0)
    assert_close(found, train_plain(build, 2, norm_type=2.0), rtol=1e-4, atol=1e-5)


def test_more_ranks_than_elements() -> None:
    """Some shards are all padding."""
    found = on_cpu(by_hand, {}, 4, norm_type=float("inf"))
    assert_close(found, train_plain(by_hand, 4, norm_type=float("inf")), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"reshard_after_forward": False, "gradient_predivide_factor": 4.0},
        {"disable_reshard_on_root": False, "process_group_reduce_scatter": "default", "bucket_cap_mb": 0},
        {"move_params_to_cpu": True, "clear_autocast_cache": True, "limit_all_gather_events": True},
    ],
    ids=str,
)
def test_options_that_change_no_result(options: dict[str, Any]) -> None:
    expected = train_plain(automatically, 2)
    assert_close(on_cpu(automatically, options), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("keep", [True, False])
@on_ranks(2)
def test_the_root_is_kept_after_forward_only_if_asked(rank: int, keep: bool) -> None:
    model = made(automatically, disable_reshard_on_root=keep)
    model(next(data(rank, 1, 1))[0])
    assert model.fsdp_state.is_sharded != keep


@on_ranks(2)
def test_accumulation_without_no_sync_adds_up_shards(rank: int) -> None:
    norms = []
    for microbatches, synced in ((1, True), (2, True), (2, False)):
        model = made(by_hand)
        for index, tokens in enumerate(next(data(rank, 1, microbatches))):
            with nullcontext() if synced or index == microbatches - 1 else model.no_sync():
                model(tokens).backward()
        norms.append(model.clip_grad_norm_(1e9))
    one, two, in_no_sync = norms
    assert two > 1.2 * one
    torch.testing.assert_close(two, in_no_sync)


# ---- dtypes of gradients --------------------------------------------------------------------------------


def reduced_grads(
    rank: int, world_size: int, param: torch.dtype, options: dict[str, Any]
) -> tuple[State, dict[str, Any], float]:
    """This rank's shards of the gradients of three microbatches, what describes them, and their norm."""
    api = names_of("flatfsdp")
    net = plain_net().to(param)
    for index, block in enumerate(net.blocks):
        net.blocks[index] = api.FullyShardedDataParallel(block, **options)
    model = api.FullyShardedDataParallel(net, **options)
    for index, tokens in enumerate(next(data(rank, 1, 3))):
        with model.no_sync() if index < 2 else nullcontext():
            model(tokens).backward()
    in_main_grad = param == torch.bfloat16 and options["fp32_reduce_scatter"]
    shards = {}
    for name, flat in model.named_parameters():
        grad, other = (flat.main_grad, flat.grad) if in_main_grad else (flat.grad, None)
        assert other is None
        assert grad.dtype == (torch.float32 if in_main_grad else param)
        shards[name.replace("module.", "")] = grad.clone()
    assert len(model.params_with_grad) == len(shards) == 4
    return shards, model.local_metadata_dict(), model.clip_grad_norm_(1e9).item()


def plain_grads(rank: int, world_size: int, compute: torch.dtype, reduce: torch.dtype) -> State:
    """The same for the plain model in `compute`, added up and averaged in `reduce`, by as many threads."""
    net = plain_net().to(compute)
    mean: State = {}
    for of_rank in range(world_size):
        batches = next(data(of_rank, 1, 3))
        grads = [torch.autograd.grad(net(tokens), list(net.parameters())) for tokens in batches]
        for (name, _), *found in zip(net.named_parameters(), *grads, strict=True):
            summed = (found[0].to(reduce) + found[1] + found[2]) / world_size
            mean[name] = mean[name] + summed if of_rank else summed
    return mean


@FLAGS
@pytest.mark.parametrize("fp32_reduce_scatter", [False, True], ids=["narrow", "fp32"])
@pytest.mark.parametrize(
    ("param", "compute"),
    [(torch.float32, torch.bfloat16), (torch.float32, torch.float16), (torch.bfloat16, torch.bfloat16)],
    ids=["mixed bf16", "mixed fp16", "pure bf16"],
)
def test_gradients_are_added_up_and_reduced_in_the_chosen_dtype(
    param: torch.dtype, compute: torch.dtype, fp32_reduce_scatter: bool, flag: bool
) -> None:
    """Bit for bit.  bf16 parameters with FP32 gradients have them in `main_grad`."""
    options = {
        "mixed_precision": param == torch.float32,
        "compute_dtype": compute,
        "fp32_reduce_scatter": fp32_reduce_scatter,
        "optimize_backward_concat": flag,
    }
    results = run_ranks(2, reduced_grads, param, options)
    reduce = torch.float32 if fp32_reduce_scatter else compute
    grads = joined(results), run_ranks(2, plain_grads, compute, reduce)[0]
    found, expected = ({name: grad.float() for name, grad in each.items()} for each in grads)
    assert_equal(found, expected)
    norm = torch.nn.utils.get_total_norm([*expected.values()])
    assert results[0][2] == pytest.approx(norm.item(), rel=1e-2)


# ---- BatchNorm ------------------------------------------------------------------------------------------


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv1d(1, 6, 3), nn.BatchNorm1d(6), nn.ReLU())
        self.head = nn.Linear(6, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.stem(tokens.to(self.head.weight.dtype)[:, None] / VOCAB)
        return nn.functional.cross_entropy(self.head(hidden.mean(-1)).float(), tokens[:, 0])


def with_batchnorm(api: Any, device: torch.device, options: dict[str, Any]) -> nn.Module:
    net = ConvNet().to(device)
    alone = options.get("single_rank_pg", False)
    if api is not PLAIN:
        net = api.auto_wrap_bn(net, single_rank_pg=alone)
        assert type(net.stem[1]).__name__ == "FullyShardedDataParallel"
    rest = {key: value for key, value in options.items() if key != "single_rank_pg"}
    return api.FullyShardedDataParallel(net, **rest)


@pytest.mark.parametrize("alone", [False, True], ids=["sharded", "whole"])
def test_batchnorm_in_its_own_unit(alone: bool) -> None:
    """Statistics are each rank's own, so rank 0 trains alone as reference; gradients are averaged."""
    results = run_ranks(2, batchnorm_step, {"single_rank_pg": alone})
    plain = made(with_batchnorm, PLAIN)
    grads = []
    for rank in range(2):
        model = made(with_batchnorm, PLAIN)
        model(next(data(rank, 1, 1))[0]).backward()
        grads.append([p.grad for p in model.parameters()])
        assert torch.equal(results[rank]["stem.1.running_mean"], model.stem[1].running_mean)
    for (name, parameter), one, other in zip(plain.named_parameters(), *grads, strict=True):
        expected = parameter.detach() - (one + other) / 2  # type: ignore[operator]
        for result in results:
            torch.testing.assert_close(result[name], expected)


def batchnorm_step(rank: int, world_size: int, options: dict[str, Any]) -> State:
    model = made(with_batchnorm, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(next(data(rank, 1, 1))[0]).backward()
    optimizer.step()
    return model.state_dict()


@on_ranks(2)
def test_batchnorm_stays_in_fp32_in_mixed_precision(rank: int) -> None:
    model = made(with_batchnorm, mixed_precision=True, compute_dtype=torch.bfloat16)
    norm = model.module.stem[1]
    inputs: list[torch.dtype] = []
    norm.register_forward_pre_hook(lambda m, args: inputs.append(args[0].dtype))
    model(next(data(rank, 1, 1))[0]).backward()
    assert inputs == [torch.bfloat16]
    assert norm.compute_dtype == norm.running_mean.dtype == torch.float32
    assert model.compute_dtype == torch.bfloat16


# ---- groups and scaling ---------------------------------------------------------------------------------


@on_ranks(2)
def test_units_may_have_other_groups_than_their_root(rank: int, world_size: int) -> None:
    """An expert on each rank in a group of one, inside a model over both."""
    api = names_of("flatfsdp")
    alone = [torch.distributed.new_group([r]) for r in range(world_size)][rank]
    torch.manual_seed(0)
    shared = nn.Linear(WIDTH, WIDTH)
    torch.manual_seed(1 + rank)
    expert = nn.Linear(WIDTH, WIDTH)
    plain = nn.Sequential(shared, expert)
    x = torch.randn(3, WIDTH)
    plain(x).square().sum().backward()
    own = expert.weight.grad.clone()
    averaged = shared.weight.grad.clone()
    torch.distributed.all_reduce(averaged, op=torch.distributed.ReduceOp.AVG)
    plain.zero_grad()
    before = [shared.weight.detach().clone(), expert.weight.detach().clone()]
    model = api.FullyShardedDataParallel(
        nn.Sequential(shared, api.FullyShardedDataParallel(expert, process_group=alone))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
    model(x).square().sum().backward()
    optimizer.step()
    state = model.state_dict()
    assert torch.equal(state["0.weight"], before[0] - averaged)
    assert torch.equal(state["1.weight"], before[1] - own)
    full = model.gather_full_optim_state_dict(optimizer)
    assert full["uncollected_local_ids"] == [1] if rank == 0 else full is None
    assert [each.no_broadcast_optim_state for each in (model, model.module[1])] == [False, True]


@on_ranks(2)
def test_groups_can_be_read() -> None:
    """The group that programs read: one that was passed, or the one that parameters are sharded over."""
    api = names_of("flatfsdp")
    every = torch.distributed.group.WORLD
    other = torch.distributed.new_group([0, 1])
    for passed, expected in (("reduce_scatter", every), ("default", every), (other, other)):
        model = api.FullyShardedDataParallel(nn.Linear(2, 2), process_group_reduce_scatter=passed)
        assert model.process_group is every and model.process_group_reduce_scatter is expected


@pytest.mark.parametrize("overflow", [False, True])
@on_ranks(2)
def test_all_ranks_skip_a_step_that_overflowed_on_one(rank: int, overflow: bool) -> None:
    """The overflow is in the first rank's shard."""
    api = names_of("flatfsdp")
    torch.manual_seed(0)
    layer = nn.Linear(WIDTH, 64, bias=False)
    model = api.FullyShardedDataParallel(layer, mixed_precision=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = api.ShardedGradScaler(2.0**8, 2.0, 0.5, 1)
    before = model.state_dict()["weight"]
    importance = torch.ones(64)
    if overflow and rank == 1:
        importance[0] = torch.inf
    scaler.scale((model(torch.randn(3, WIDTH)).float() * importance).mean()).backward()
    assert bool(model.flat_param.grad.isfinite().all()) == (not overflow or rank == 1)
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(model.state_dict()["weight"], before) == overflow
    assert scaler.get_scale() == (2.0**7 if overflow else 2.0**9)


# ---- beside fairscale itself ----------------------------------------------------------------------------

on_gpus = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
ZERO2 = {"reshard_after_forward": False}
MIXED = {"mixed_precision": True, "compute_dtype": torch.bfloat16, "buffer_dtype": torch.float32}


def beside_fairscale(program: Callable[..., Any], *args: Any) -> tuple[list[Any], list[Any]]:
    """The results of a program on two GPUs, with fairscale and with ours."""
    pytest.importorskip("fairscale")
    theirs, ours = (
        run_ranks(2, program, library, "cuda", *args, backend="nccl") for library in ("fairscale", "flatfsdp")
    )
    return theirs, ours


def compare_bits(build: Build, options: dict[str, Any], flag: bool, loop: dict[str, Any]) -> None:
    pytest.importorskip("fairscale")
    theirs = run_ranks(2, trained, "fairscale", "cuda", build, options, loop, backend="nccl")
    options = {**options, "optimize_backward_concat": flag}
    ours = run_ranks(2, trained, "flatfsdp", "cuda", build, options, loop, backend="nccl")
    for (their_losses, their_state), (our_losses, our_state) in zip(theirs, ours, strict=True):
        assert [loss.item() for loss in our_losses] == [loss.item() for loss in their_losses]
        # In fairscale's, tied parameters come last.
        assert_equal(our_state, their_state)


class TestBesideFairscale:
    pytestmark = on_gpus

    @FLAGS
    @pytest.mark.parametrize("options", [{}, ZERO2], ids=["zero3", "zero2"])
    @pytest.mark.parametrize("build", BUILDS)
    def test_same_bits_in_fp32(self, build: Build, options: dict[str, Any], flag: bool) -> None:
        # The 2-norm is summed over shards, which are cut elsewhere; the maximum is exact.
        compare_bits(build, options, flag, {"norm_type": float("inf")})

    @FLAGS
    @pytest.mark.parametrize(
        "options", [MIXED, {**MIXED, "compute_dtype": torch.float16}], ids=["bf16", "fp16"]
    )
    def test_same_bits_in_mixed_precision(self, options: dict[str, Any], flag: bool) -> None:
        compare_bits(automatically, options, flag, {})

    @FLAGS
    def test_same_bits_with_fp32_reduction(self, flag: bool) -> None:
        """Has one microbatch: 0.4.13 still adds microbatches up in compute_dtype."""
        options = {**MIXED, "fp32_reduce_scatter": True}
        compare_bits(automatically, options, flag, {"microbatches": 1})

    def test_same_bits_with_shards_in_host_memory(self) -> None:
        compare_bits(automatically, {"move_params_to_cpu": True}, False, {})

    def test_programs_pass_with_either(self) -> None:
        for program in (saved_and_loaded, summoned):
            for results in beside_fairscale(program):
                assert all(all(result.values()) for result in results), results

    def test_fairscales_shards_are_joined(self) -> None:
        files = run_ranks(2, local_files, "fairscale", "cuda", by_hand, backend="nccl")
        assert_equal(joined(files), files[0][2])

    @pytest.mark.parametrize("build", [by_hand, tied_and_frozen])
    def test_optimizer_state_moves_between_both(self, build: Build) -> None:
        """Either one continues from the other's checkpoint, to the same bits."""
        theirs, ours = beside_fairscale(optimizer_is_saved, build)
        (state, their_full, final), (_, our_full, _) = theirs[0], ours[0]
        assert their_full["param_id_map"] == our_full["param_id_map"]
        for number, entry in their_full["state"].items():
            for key, value in entry.items():
                assert torch.equal(torch.as_tensor(our_full["state"][number][key]), torch.as_tensor(value))
        for full in (our_full, their_full):
            for results in beside_fairscale(optimizer_is_loaded, build, state, full):
                for found in results:
                    assert all(torch.equal(found[name], value) for name, value in final.items())
