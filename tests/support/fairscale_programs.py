"""Programs written for fairscale: models, and what is done with them; each can run with several libraries.

A *program* takes the names that it would import as one object, `api`: fairscale's own, ours, or `PLAIN`,
which wraps nothing.  Those that ranks run take the library's name and a device in its place.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

import flatfsdp.compat.fairscale
from tests.support.models import Block, Net, data, repeatable, update

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


def with_blocks(net: Net, wrap: Callable[[nn.Module], nn.Module]) -> Net:
    """The net, with each block replaced by what `wrap` makes of it."""
    for index, block in enumerate(net.blocks):
        net.blocks[index] = wrap(block)
    return net


def checkpoint_in_unit(api: Any, device: torch.device, options: dict[str, Any]) -> nn.Module:
    unit = partial(api.FullyShardedDataParallel, **options)
    return unit(with_blocks(Net().to(device), lambda block: unit(api.checkpoint_wrapper(block))))


def unit_in_checkpoint(api: Any, device: torch.device, options: dict[str, Any]) -> nn.Module:
    unit = partial(api.FullyShardedDataParallel, **options)
    offloaded = partial(api.checkpoint_wrapper, offload_to_cpu=True)
    return unit(with_blocks(Net().to(device), lambda block: offloaded(unit(block))))


def tied_and_frozen(api: Any, device: torch.device, options: dict[str, Any]) -> nn.Module:
    net = Net().to(device)
    net.head.weight = net.embedding.weight
    net.blocks[1].requires_grad_(False)
    unit = partial(api.FullyShardedDataParallel, **options)
    return unit(with_blocks(net, unit))


BUILDS: list[Build] = [by_hand, automatically, checkpoint_in_unit, unit_in_checkpoint, tied_and_frozen]

# ---- training -------------------------------------------------------------------------------------------


CPU = torch.device("cpu")


def made(
    build: Build, api: Any = flatfsdp.compat.fairscale, device: torch.device = CPU, **options: Any
) -> Any:
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
        update(optimizer)
    return seen


def train_plain(
    build: Build, world_size: int, *, norm_type: float | None = None
) -> tuple[list[Tensor], State]:
    """The same training of the plain model in one process, as `train` sees it on rank 0."""
    model = made(build, PLAIN)
    optimizer = adam(model.parameters())
    seen = []
    for per_rank in zip(*(data(rank, 2, 2) for rank in range(world_size)), strict=True):
        for rank, batches in enumerate(per_rank):
            for tokens in batches:
                loss = model(tokens)
                (loss / world_size).backward()
                if rank == 0:
                    seen.append(loss.detach())
        if norm_type is not None:
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5, norm_type)
            seen.append(norm.detach())
        update(optimizer)
    return seen, model.state_dict()


@repeatable()
def trained(
    rank: int,
    world_size: int,
    library: str,
    device: str,
    build: Build,
    options: dict[str, Any],
    loop: dict[str, Any],
) -> tuple[list[Tensor], State]:
    # fairscale wants parameters that shall be in host memory to be there at first.
    built_on = "cpu" if options.get("move_params_to_cpu") else device
    model = made(build, names_of(library), torch.device(built_on), **options)
    seen = train(model, adam(model.parameters()), rank, torch.device(device), **loop)
    return seen, {name: value.cpu() for name, value in model.state_dict().items()}


# ---- checkpoints ----------------------------------------------------------------------------------------


def saved_and_loaded(rank: int, world_size: int, library: str, device: str) -> dict[str, bool]:
    """Full and local state dicts into a model of other values; who gets what, and where it is."""
    api, where = names_of(library), torch.device(device)
    source = made(by_hand, api, where)
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
    plain = made(by_hand, PLAIN, where)
    plain.load_state_dict(full)
    tokens = next(data(rank, 1, 1))[0].to(where)
    with torch.no_grad():
        outputs = [model(tokens) for model in (plain, source, from_full, from_local)]
    result["outputs"] = all(torch.equal(outputs[0], out) for out in outputs[1:])
    options = {"state_dict_on_rank_0_only": True, "state_dict_device": torch.device("cpu")}
    on_first = made(by_hand, api, where, **options).state_dict()
    result["rank 0 only"] = set(on_first) == (set(full) if rank == 0 else set())
    result["on the CPU"] = all(value.device.type == "cpu" for value in on_first.values())
    return result


def local_files(
    rank: int, world_size: int, library: str, device: str, build: Build
) -> tuple[dict[str, Any], dict[str, Any], State]:
    model = made(build, names_of(library), torch.device(device))
    local = {name: value.cpu() for name, value in model.local_state_dict().items()}
    return local, model.local_metadata_dict(), {k: v.cpu() for k, v in model.state_dict().items()}


def joined(files: Sequence[tuple[dict[str, Any], Any, Any]]) -> State:
    """What all ranks' shards are together; `files` are the results of `local_files`, in rank order."""
    join = flatfsdp.compat.fairscale.FSDP.consolidate_shard_weights
    return join([local for local, _, _ in files], [metadata for _, metadata, _ in files])


def optimizer_is_saved(
    rank: int, world_size: int, library: str, device: str, build: Build
) -> tuple[State, dict[str, Any] | None, State]:
    """Two steps, a checkpoint of model and optimizer, and two more steps.  All ranks see the same data."""
    where = torch.device(device)
    model = made(build, names_of(library), where)
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
    rank: int, world_size: int, library: str, device: str, build: Build, state: State, full: dict[str, Any]
) -> State:
    """Trains the last two steps from the checkpoint."""
    where = torch.device(device)
    torch.manual_seed(2)
    model: Any = build(names_of(library), where, {})
    model.load_state_dict(state)
    optimizer = adam(model.parameters())
    optimizer.load_state_dict(model.get_shard_from_optim_state_dict(full))
    train(model, optimizer, 0, where)
    return {name: value.cpu() for name, value in model.state_dict().items()}


# ---- whole parameters -----------------------------------------------------------------------------------


def summoned(rank: int, world_size: int, library: str, device: str) -> dict[str, bool]:
    api, where = names_of(library), torch.device(device)
    model = made(by_hand, api, where)
    plain = made(by_hand, PLAIN, where)
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
