"""Programs written for fairscale run on FlatFSDP after a change of import, and compute what they should.

A *program* takes the names that it would import as one object, `api`.  On the CPU it runs with ours and is
compared with the plain model; on two GPUs it runs with fairscale itself as well, and all bits are compared.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flatfsdp.compat.fairscale
from tests.dist.models import VOCAB, WIDTH, Block, Net, data
from tests.dist.ranks import run_ranks

Build = Callable[[Any, torch.device, dict[str, Any]], nn.Module]
State = dict[str, Tensor]

# ---- the names a program imports ------------------------------------------------------------------------


def names_of(library: str) -> Any:
    if library == "flatfsdp":
        return flatfsdp.compat.fairscale
    from fairscale.nn.checkpoint import checkpoint_wrapper
    from fairscale.nn.data_parallel import FullyShardedDataParallel, auto_wrap_bn
    from fairscale.nn.wrap import auto_wrap, default_auto_wrap_policy, enable_wrap, wrap

    return SimpleNamespace(
        FullyShardedDataParallel=FullyShardedDataParallel,
        auto_wrap=auto_wrap,
        auto_wrap_bn=auto_wrap_bn,
        checkpoint_wrapper=checkpoint_wrapper,
        default_auto_wrap_policy=default_auto_wrap_policy,
        enable_wrap=enable_wrap,
        wrap=wrap,
    )


def unwrapped(module: nn.Module, *_: Any, **__: Any) -> nn.Module:
    return module


@contextmanager
def nothing(*_: Any, **__: Any) -> Iterator[None]:
    yield


PLAIN = SimpleNamespace(
    FullyShardedDataParallel=unwrapped,
    auto_wrap=unwrapped,
    checkpoint_wrapper=unwrapped,
    default_auto_wrap_policy=None,
    enable_wrap=nothing,
    wrap=unwrapped,
)
"""The same program without any wrapper."""

# ---- models of the programs -----------------------------------------------------------------------------


def by_hand(api: Any, device: torch.device, options: dict[str, Any]) -> nn.Module:
    """Layers are annotated where they are made; uneven sizes, and a unit smaller than the number of ranks."""

    class Annotated(Net):
        def __init__(self) -> None:
            super().__init__(blocks=0)
            self.blocks = nn.ModuleList(api.wrap(Block().to(device)) for _ in range(3))
            self.temperature = api.wrap(nn.Linear(1, 1).to(device))

        def logits(self, tokens: Tensor) -> Tensor:
            logits = super().logits(tokens)
            return logits * self.temperature(logits.new_ones(1))

    with api.enable_wrap(wrapper_cls=api.FullyShardedDataParallel, **options):
        return api.wrap(Annotated().to(device))


def automatically(api: Any, device: torch.device, options: dict[str, Any]) -> nn.Module:
    """Modules of more than 1000 parameters become units."""
    policy = api.default_auto_wrap_policy and partial(
        api.default_auto_wrap_policy, min_num_params=1000, skip_params_check_for_root=True
    )
    with api.enable_wrap(policy, wrapper_cls=api.FullyShardedDataParallel, **options):
        return api.auto_wrap(Net().to(device))


def checkpoint_in_unit(api: Any, device: torch.device, options: dict[str, Any]) -> nn.Module:
    net = Net().to(device)
    for index, block in enumerate(net.blocks):
        net.blocks[index] = api.FullyShardedDataParallel(api.checkpoint_wrapper(block), **options)
    return api.FullyShardedDataParallel(net, **options)


def unit_in_checkpoint(api: Any, device: torch.device, options: dict[str, Any]) -> nn.Module:
    net = Net().to(device)
    for index, block in enumerate(net.blocks):
        net.blocks[index] = api.checkpoint_wrapper(
            api.FullyShardedDataParallel(block, **options), offload_to_cpu=True
        )
    return api.FullyShardedDataParallel(net, **options)


def tied_and_frozen(api: Any, device: torch.device, options: dict[str, Any]) -> nn.Module:
    net = Net().to(device)
    net.head.weight = net.embedding.weight
    net.blocks[1].requires_grad_(False)
    for index, block in enumerate(net.blocks):
        net.blocks[index] = api.FullyShardedDataParallel(block, **options)
    return api.FullyShardedDataParallel(net, **options)


BUILDS: list[Build] = [by_hand, automatically, checkpoint_in_unit, unit_in_checkpoint, tied_and_frozen]

# ---- training -------------------------------------------------------------------------------------------


def made(build: Build, api: Any, device: torch.device, options: dict[str, Any]) -> nn.Module:
    torch.manual_seed(0)
    return build(api, device, options)


def adam(parameters: Any) -> torch.optim.Optimizer:
    # fairscale's class of flat parameters makes torch.optim choose the loop over parameters.
    return torch.optim.AdamW(parameters, lr=1e-2, foreach=False)


def train(
    model: Any,
    optimizer: torch.optim.Optimizer,
    rank: int,
    device: torch.device,
    *,
    microbatches: int = 2,
    norm_type: float | None = None,
    steps: int = 2,
) -> list[Tensor]:
    """A fairscale training loop; returns this rank's losses, and the gradient norms if it clips."""
    seen = []
    for batches in data(rank, steps, microbatches):
        for index, tokens in enumerate(batches):
            with model.no_sync() if index < microbatches - 1 else nullcontext():
                loss = model(tokens.to(device))
                loss.backward()
            seen.append(loss.detach().cpu())
        if norm_type is not None:
            seen.append(model.clip_grad_norm_(0.5, norm_type).detach().cpu())
        optimizer.step()
        optimizer.zero_grad()
    return seen


def train_plain(
    build: Build,
    world_size: int,
    *,
    microbatches: int = 2,
    norm_type: float | None = None,
    steps: int = 2,
) -> tuple[list[Tensor], State]:
    """The same training of the plain model in one process, as `train` sees it on rank 0."""
    model = made(build, PLAIN, torch.device("cpu"), {})
    optimizer = adam(model.parameters())
    seen = []
    for per_rank in zip(*(data(rank, steps, microbatches) for rank in range(world_size)), strict=True):
        for rank, batches in enumerate(per_rank):
            for tokens in batches:
                loss = model(tokens)
                (loss / world_size).backward()
                if rank == 0:
                    seen.append(loss.detach())
        if norm_type is not None:
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5, norm_type)
            seen.append(norm.detach())
        optimizer.step()
        optimizer.zero_grad()
    return seen, model.state_dict()


def trained(
    rank: int,
    world_size: int,
    library: str,
    device: str,
    build: Build,
    options: dict[str, Any],
    loop: dict[str, Any],
) -> tuple[list[Tensor], State]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    # fairscale wants parameters that shall be in host memory to be there at first.
    built_on = "cpu" if options.get("move_params_to_cpu") else device
    model = made(build, names_of(library), torch.device(built_on), options)
    seen = train(model, adam(model.parameters()), rank, torch.device(device), **loop)
    return seen, {name: value.cpu() for name, value in model.state_dict().items()}


def on_cpu(
    build: Build, options: dict[str, Any], world_size: int = 2, **loop: Any
) -> tuple[list[Tensor], State]:
    """What rank 0 saw, after a check that all ranks end with the same model."""
    results = run_ranks(world_size, trained, "flatfsdp", "cpu", build, options, loop)
    for _, state in results[1:]:
        assert all(torch.equal(state[name], value) for name, value in results[0][1].items())
    return results[0]


def assert_close(
    found: tuple[list[Tensor], State], expected: tuple[list[Tensor], State], **tolerance: float
) -> None:
    assert list(found[1]) == list(expected[1])
    for name, value in expected[1].items():
        torch.testing.assert_close(
            found[1][name], value, **tolerance, msg=lambda m, name=name: f"{name}: {m}"
        )
    for ours, plain in zip(found[0], expected[0], strict=True):
        torch.testing.assert_close(ours.reshape(()), plain.reshape(()), **tolerance)


FLAGS = pytest.mark.parametrize("flag", [False, True], ids=["flag off", "flag on"])


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


def is_gathered_after_forward(rank: int, world_size: int, keep: bool) -> bool:
    options = {"disable_reshard_on_root": keep}
    model: Any = made(automatically, names_of("flatfsdp"), torch.device("cpu"), options)
    model(next(data(rank, 1, 1))[0])
    return not model._unit.is_sharded


def test_the_root_is_kept_after_forward_only_if_asked() -> None:
    assert run_ranks(2, is_gathered_after_forward, True) == [True, True]
    assert run_ranks(2, is_gathered_after_forward, False) == [False, False]


def accumulate_without_no_sync(rank: int, world_size: int) -> list[Tensor]:
    """Gradient norms after one backward, after two without no_sync, and after two with it."""
    norms = []
    for microbatches, synced in ((1, True), (2, True), (2, False)):
        model: Any = made(by_hand, names_of("flatfsdp"), torch.device("cpu"), {})
        for index, tokens in enumerate(next(data(rank, 1, microbatches))):
            with nullcontext() if synced or index == microbatches - 1 else model.no_sync():
                model(tokens).backward()
        norms.append(model.clip_grad_norm_(1e9))
    return norms


def test_accumulation_without_no_sync_adds_up_shards() -> None:
    one, two, in_no_sync = run_ranks(2, accumulate_without_no_sync)[0]
    assert two > 1.2 * one
    torch.testing.assert_close(two, in_no_sync)


# ---- dtypes of gradients --------------------------------------------------------------------------------


def reduced_grads(
    rank: int, world_size: int, param: torch.dtype, options: dict[str, Any]
) -> tuple[State, dict[str, Any], float]:
    """This rank's shards of the gradients of three microbatches, what describes them, and their norm."""
    api = names_of("flatfsdp")
    torch.manual_seed(0)
    net = Net().to(param)
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
    """The same of the plain model in `compute`, added up and averaged in `reduce`, by as many threads."""
    torch.manual_seed(0)
    net = Net().to(compute)
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
    [
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float16),
        (torch.bfloat16, torch.bfloat16),
    ],
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
    join = names_of("flatfsdp").FullyShardedDataParallel.consolidate_shard_weights
    found = join([shards for shards, _, _ in results], [metadata for _, metadata, _ in results])
    reduce = torch.float32 if fp32_reduce_scatter else compute
    expected = run_ranks(2, plain_grads, compute, reduce)[0]
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        assert torch.equal(found[name].float(), grad.float()), name
    norm = torch.nn.utils.get_total_norm([grad.float() for grad in expected.values()])
    assert results[0][2] == pytest.approx(norm.item(), rel=1e-2)


# ---- checkpoints ----------------------------------------------------------------------------------------


def saved_and_loaded(rank: int, world_size: int, library: str, device: str) -> dict[str, bool]:
    """Full and local state dicts into a model of other values; who gets what, and where it is."""
    api, where = names_of(library), torch.device(device)
    source = made(by_hand, api, where, {})
    train(source, adam(source.parameters()), rank, where, steps=1)
    full, local = source.state_dict(), source.local_state_dict()

    def same(model: nn.Module) -> bool:
        return all(torch.equal(value, full[name]) for name, value in model.state_dict().items())

    torch.manual_seed(1)
    from_full, from_local = by_hand(api, where, {}), by_hand(api, where, {})
    result = {"differs at first": not same(from_full) and not same(from_local)}
    from_full.load_state_dict(full)
    from_local.load_local_state_dict(local)
    result["full"], result["local"] = same(from_full), same(from_local)
    plain = made(by_hand, PLAIN, where, {})
    plain.load_state_dict(full)
    tokens = next(data(rank, 1, 1))[0].to(where)
    with torch.no_grad():
        outputs = [model(tokens) for model in (plain, source, from_full, from_local)]
    result["outputs"] = all(torch.equal(outputs[0], out) for out in outputs[1:])
    options = {"state_dict_on_rank_0_only": True, "state_dict_device": torch.device("cpu")}
    on_first = made(by_hand, api, where, options).state_dict()
    result["rank 0 only"] = set(on_first) == (set(full) if rank == 0 else set())
    result["on the CPU"] = all(value.device.type == "cpu" for value in on_first.values())
    return result


def test_state_dicts_are_saved_and_loaded() -> None:
    for result in run_ranks(2, saved_and_loaded, "flatfsdp", "cpu"):
        assert all(result.values()), result


def missing_key(rank: int, world_size: int) -> str:
    model = made(by_hand, names_of("flatfsdp"), torch.device("cpu"), {})
    state = model.state_dict()
    del state["blocks.1.up.weight"]
    state["extra"] = torch.zeros(1)
    reported = model.load_state_dict(state, strict=False)
    assert (reported.missing_keys, reported.unexpected_keys) == (["blocks.1.up.weight"], ["extra"])
    with pytest.raises(RuntimeError) as error:
        model.load_state_dict(state)
    return str(error.value)


def test_a_state_dict_that_does_not_fit_is_reported_by_name() -> None:
    for message in run_ranks(2, missing_key):
        assert 'Missing key(s) in state_dict: "blocks.1.up.weight"' in message
        assert 'Unexpected key(s) in state_dict: "extra"' in message


def local_files(
    rank: int, world_size: int, library: str, device: str, build: Build
) -> tuple[dict[str, Any], dict[str, Any], State]:
    model = made(build, names_of(library), torch.device(device), {})
    local = {name: value.cpu() for name, value in model.local_state_dict().items()}
    return local, model.local_metadata_dict(), {k: v.cpu() for k, v in model.state_dict().items()}


@pytest.mark.parametrize("build", [by_hand, tied_and_frozen])
def test_local_shards_are_joined_without_ranks(build: Build) -> None:
    files = run_ranks(4, local_files, "flatfsdp", "cpu", build)
    join = flatfsdp.compat.fairscale.FSDP.consolidate_shard_weights
    joined = join([local for local, _, _ in files], [metadata for _, metadata, _ in files])
    assert joined.keys() == files[0][2].keys()
    assert all(torch.equal(joined[name], value) for name, value in files[0][2].items())
    with pytest.raises(ValueError, match="one pair a rank"):
        join([files[0][0]], [])
    with pytest.raises(ValueError, match="is missing"):
        join([files[0][0]], [files[0][1]])


# ---- optimizer state ------------------------------------------------------------------------------------


def optimizer_is_saved(
    rank: int, world_size: int, library: str, device: str, build: Build
) -> tuple[State, dict[str, Any] | None, State]:
    """Two steps, a checkpoint of model and optimizer, and two more steps.  All ranks see the same data."""
    where = torch.device(device)
    model: Any = made(build, names_of(library), where, {})
    optimizer = adam(model.parameters())
    train(model, optimizer, 0, where)
    state = {name: value.cpu() for name, value in model.state_dict().items()}
    # fairscale's method turns the optimizer's own step counters into numbers that torch.optim refuses.
    kept = copy.deepcopy(optimizer.state_dict())
    full = model.gather_full_optim_state_dict(optimizer, recipient_rank=0)
    optimizer.load_state_dict(kept)
    train(model, optimizer, 0, where)
    return state, full, {name: value.cpu() for name, value in model.state_dict().items()}


def optimizer_is_loaded(
    rank: int,
    world_size: int,
    library: str,
    device: str,
    build: Build,
    state: State,
    full: dict[str, Any],
) -> State:
    """The two last steps from the checkpoint."""
    where = torch.device(device)
    torch.manual_seed(2)
    model: Any = build(names_of(library), where, {})
    model.load_state_dict(state)
    optimizer = adam(model.parameters())
    optimizer.load_state_dict(model.get_shard_from_optim_state_dict(full))
    train(model, optimizer, 0, where)
    return {name: value.cpu() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("build", [by_hand, tied_and_frozen])
def test_optimizer_state_moves_to_other_numbers_of_ranks(build: Build) -> None:
    results = run_ranks(4, optimizer_is_saved, "flatfsdp", "cpu", build)
    assert [full for _, full, _ in results[1:]] == [None] * 3
    state, full, final = results[0]
    assert full is not None
    numbers = list(full["param_id_map"])
    assert numbers == full["param_groups"][0]["params"] == list(range(len(numbers)))
    assert full["uncollected_local_ids"] == []
    plain = made(build, PLAIN, torch.device("cpu"), {})
    trained = [p for p in plain.parameters() if p.requires_grad]
    shapes = sorted(tuple(entry["exp_avg"].shape) for entry in full["state"].values())
    assert shapes == sorted(tuple(p.shape) for p in trained)
    frozen = [number for number, local in full["param_id_map"].items() if local is None]
    assert len(frozen) == len(list(plain.parameters())) - len(trained)
    assert all(entry["step"] == 2 for entry in full["state"].values())
    for world_size in (1, 2, 4):
        for found in run_ranks(world_size, optimizer_is_loaded, "flatfsdp", "cpu", build, state, full):
            for name, value in final.items():
                torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)


def loads_what_does_not_fit(rank: int, world_size: int) -> None:
    api, cpu = names_of("flatfsdp"), torch.device("cpu")
    model: Any = made(by_hand, api, cpu, {})
    optimizer = adam(model.parameters())
    train(model, optimizer, rank, cpu, steps=1)
    full = model.gather_full_optim_state_dict(optimizer)
    if rank == 0:
        with pytest.raises(ValueError, match="has 4 parameters and this model"):
            model.get_shard_from_optim_state_dict({**full, "param_id_map": dict.fromkeys(range(4), 0)})
        moved = dict.fromkeys(full["param_id_map"], 3)
        with pytest.raises(ValueError, match="wrap the same modules"):
            model.get_shard_from_optim_state_dict({**full, "param_id_map": moved})
        wrong = {**full["state"], 0: {"exp_avg": torch.zeros(3, 3)}}
        with pytest.raises(ValueError, match="has shape"):
            model.get_shard_from_optim_state_dict({**full, "state": wrong})
    groups = [{"params": [p]} for p in model.parameters()]
    with pytest.raises(AssertionError, match="full_optimizer_state_dict"):
        model.gather_full_optim_state_dict(torch.optim.SGD(groups, lr=0.1))


def test_optimizer_state_that_does_not_fit_is_refused() -> None:
    run_ranks(2, loads_what_does_not_fit)


# ---- summon ---------------------------------------------------------------------------------------------


def summoned(rank: int, world_size: int, library: str, device: str) -> dict[str, bool]:
    api, where = names_of(library), torch.device(device)
    model: Any = made(by_hand, api, where, {})
    plain = made(by_hand, PLAIN, where, {})
    result = {}
    with model.summon_full_params():
        shown = dict(model.named_parameters())
        expected = dict(plain.named_parameters())
        result["names"] = set(shown) == set(expected)
        result["values"] = all(torch.equal(shown[name], value) for name, value in expected.items())
        for parameter in model.parameters():
            parameter.data.mul_(2.0)
    doubled = model.state_dict()
    result["written"] = all(torch.equal(doubled[name], 2 * value) for name, value in expected.items())
    inner = model.module.blocks[1]
    with inner.summon_full_params(volatile=True):
        inner.up.weight.data.zero_()
    result["volatile"] = all(torch.equal(v, doubled[name]) for name, v in model.state_dict().items())
    try:
        with model.summon_full_params(), model.summon_full_params():
            result["refused"] = False
    except ValueError:
        result["refused"] = True
    tokens = next(data(rank, 1, 1))[0].to(where)
    for parameter in plain.parameters():
        parameter.data.mul_(2.0)
    result["loss"] = torch.equal(model(tokens), plain(tokens))
    return result


def test_full_parameters_are_summoned() -> None:
    for result in run_ranks(2, summoned, "flatfsdp", "cpu"):
        assert all(result.values()), result


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
    plain = made(with_batchnorm, PLAIN, torch.device("cpu"), {})
    grads = []
    for rank in range(2):
        model = made(with_batchnorm, PLAIN, torch.device("cpu"), {})
        model(next(data(rank, 1, 1))[0]).backward()
        grads.append([p.grad for p in model.parameters()])
        assert torch.equal(results[rank]["stem.1.running_mean"], model.stem[1].running_mean)
    for (name, parameter), one, other in zip(plain.named_parameters(), *grads, strict=True):
        expected = parameter.detach() - (one + other) / 2  # type: ignore[operator]
        for result in results:
            torch.testing.assert_close(result[name], expected)


def batchnorm_step(rank: int, world_size: int, options: dict[str, Any]) -> State:
    model = made(with_batchnorm, names_of("flatfsdp"), torch.device("cpu"), options)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(next(data(rank, 1, 1))[0]).backward()
    optimizer.step()
    return model.state_dict()


def batchnorm_in_mixed_precision(rank: int, world_size: int) -> list[torch.dtype]:
    options = {"mixed_precision": True, "compute_dtype": torch.bfloat16}
    model: Any = made(with_batchnorm, names_of("flatfsdp"), torch.device("cpu"), options)
    norm = model.module.stem[1]
    inputs: list[torch.dtype] = []
    norm.register_forward_pre_hook(lambda m, args: inputs.append(args[0].dtype))
    model(next(data(rank, 1, 1))[0]).backward()
    return [*inputs, norm.compute_dtype, norm.running_mean.dtype, model.compute_dtype]


def test_batchnorm_stays_in_fp32_in_mixed_precision() -> None:
    expected = [torch.bfloat16, torch.float32, torch.float32, torch.bfloat16]
    assert run_ranks(2, batchnorm_in_mixed_precision) == [expected, expected]


# ---- groups and scaling ---------------------------------------------------------------------------------


def experts(rank: int, world_size: int) -> tuple[bool, Any]:
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
    same = torch.equal(state["0.weight"], before[0] - averaged) and torch.equal(
        state["1.weight"], before[1] - own
    )
    full = model.gather_full_optim_state_dict(optimizer)
    return same, None if full is None else full["uncollected_local_ids"]


def test_units_may_have_other_groups_than_their_root() -> None:
    assert run_ranks(2, experts) == [(True, [1]), (True, None)]


def scaled(rank: int, world_size: int, overflow: bool) -> tuple[bool, float]:
    """Whether the weight changed, and the scale afterwards.  What overflows is in the first rank's shard."""
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
    return not torch.equal(model.state_dict()["weight"], before), scaler.get_scale()


@pytest.mark.parametrize("overflow", [False, True])
def test_all_ranks_skip_a_step_that_overflowed_on_one(overflow: bool) -> None:
    expected = (False, 2.0**7) if overflow else (True, 2.0**9)
    assert run_ranks(2, scaled, overflow) == [expected, expected]


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
        assert our_state.keys() == their_state.keys()
        assert [n for n, v in our_state.items() if not torch.equal(v, their_state[n])] == []


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
        """Of one microbatch: 0.4.13 still adds microbatches up in compute_dtype."""
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
        join = flatfsdp.compat.fairscale.FSDP.consolidate_shard_weights
        joined = join([local for local, _, _ in files], [metadata for _, metadata, _ in files])
        assert joined.keys() == files[0][2].keys()
        assert all(torch.equal(joined[name], value) for name, value in files[0][2].items())

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
