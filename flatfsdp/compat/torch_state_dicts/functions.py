"""State dicts of sharded models for `torch.distributed.checkpoint.state_dict`.

In:   a model, optimizers, and PyTorch's options.
Out:  with `full_state_dict=True` whole tensors, by `flatfsdp.checkpoint`; otherwise ValueError.

A model without units still gets PyTorch's own functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache, wraps
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.checkpoint import state_dict as torchs
from torch.nn.modules.module import _IncompatibleKeys

from flatfsdp.checkpoint import (
    full_optimizer_state_dict,
    full_state_dict,
    load_full_optimizer_state_dict,
    load_full_state_dict,
)
from flatfsdp.comm.objects import broadcast_object
from flatfsdp.contract.transparent import prefixed_modules
from flatfsdp.engine.whole.units import keys_of_slots, named_groups, units_in

Optimizers = Iterable[torch.optim.Optimizer]


@cache
def install() -> None:
    """Replaces the private functions behind PyTorch's public ones by those below.

    Raises:
        RuntimeError: if this version of PyTorch lacks one of them.
    """
    getters: list[Any] = [_get_model_state_dict, _get_optim_state_dict]
    for ours in (*getters, _load_model_state_dict, _load_optim_state_dict):
        name = ours.__name__
        if not hasattr(torchs, name):
            cause = f"torch {torch.__version__} has no torch.distributed.checkpoint.state_dict.{name}"
            raise RuntimeError(f"{cause}; use save and load, or full_state_dict, of flatfsdp.checkpoint")
        setattr(torchs, name, _for_sharded_models(getattr(torchs, name), ours))


R = TypeVar("R")


def _for_sharded_models(original: Callable[..., R], ours: Callable[..., R]) -> Callable[..., R]:
    """Chooses `ours` for models that contain units, `original` for all others."""

    @wraps(original)
    def chosen(model: nn.Module, *args: Any, **kwargs: Any) -> R:
        if next(units_in(model), None) is None:
            return original(model, *args, **kwargs)
        return ours(model, *args, **kwargs)

    return chosen


_WAY_OUT = (
    "pass StateDictOptions(full_state_dict=True) for whole tensors. For every rank to write its part, use "
    "flatfsdp.checkpoint.save and load, or flatfsdp.checkpoint.sharded_training_state with "
    "torch.distributed.checkpoint"
)


def _require_full(info: Any) -> None:
    """Checks the options of a state dict.

    Raises:
        ValueError: for options that ask for anything but whole tensors by their names.
    """
    whole = "flatten_optimizer_state_dict=True"
    for is_asked, what, instead in (
        (not info.full_state_dict, "a state dict by names that holds this rank's flat shards", _WAY_OUT),
        (info.submodule_prefixes, "submodules=", "leave it out and take the keys that you want"),
        (info.flatten_optimizer_state_dict, whole, "leave it out, or use flatfsdp.checkpoint.save and load"),
    ):
        if is_asked:
            raise ValueError(f"{what} is not supported for a FlatFSDP model; {instead}")


def _get_model_state_dict(model: nn.Module, info: Any) -> dict[str, Any]:
    if not info.handle_model:
        return {}
    _require_full(info)
    state = full_state_dict(model, rank0_only=info.cpu_offload, cpu_offload=info.cpu_offload)
    frozen = _frozen(model) if info.ignore_frozen_params else set()
    return {_canonical(key): value for key, value in state.items() if key not in frozen}


def _get_optim_state_dict(model: nn.Module, optimizers: Optimizers, info: Any) -> dict[str, Any]:
    if not info.handle_optim:
        return {}
    _require_full(info)
    whole: dict[str, Any] = {"state": {}, "param_groups": []}
    for optimizer in optimizers:
        of_one = full_optimizer_state_dict(
            model, optimizer, rank0_only=info.cpu_offload, cpu_offload=info.cpu_offload
        )
        of_one = _renamed(of_one, _canonical)
        whole["state"].update(of_one.get("state", {}))
        whole["param_groups"] += of_one.get("param_groups", [])
    return whole if whole["param_groups"] else {}


def _load_model_state_dict(model: nn.Module, state_dict: dict[str, Any], info: Any) -> _IncompatibleKeys:
    wanted = info.handle_model and bool(state_dict)
    if info.broadcast_from_rank0:
        # Ranks other than the first have been given nothing in either case.
        first = named_groups(model)[0][1].master
        wanted = broadcast_object(wanted, first.grid.dimensions[::-1], first.device)
    if not wanted:
        return _IncompatibleKeys([], [])
    _require_full(info)
    own = {_without_compiler(key): key for key in _keys(model)}
    given = {own.get(key, key): value for key, value in state_dict.items()}
    return load_full_state_dict(model, given, from_rank0=info.broadcast_from_rank0, strict=info.strict)


def _load_optim_state_dict(
    model: nn.Module, optimizers: Optimizers, state_dict: dict[str, Any], info: Any
) -> None:
    if not info.handle_optim:
        return
    _require_full(info)
    own = {_canonical(key): key for keys in keys_of_slots(model).values() for key in keys}
    given = _renamed(state_dict, lambda name: own.get(name, name))
    for optimizer in optimizers:
        load_full_optimizer_state_dict(model, optimizer, given, from_rank0=info.broadcast_from_rank0)


def _keys(model: nn.Module) -> Iterator[str]:
    """Keys of all parameters and buffers as in `model.state_dict()`, among others."""
    for prefix, module in prefixed_modules(model):
        yield from (prefix + name for name in (*module._parameters, *module._buffers))
    for keys in keys_of_slots(model).values():
        yield from keys


def _frozen(model: nn.Module) -> set[str]:
    """Keys of the frozen parameters."""
    inside = {key for (group, _), keys in keys_of_slots(model).items() if not group.trains for key in keys}
    return inside | {name for name, parameter in model.named_parameters() if not parameter.requires_grad}


def _renamed(state: dict[str, Any], rename: Callable[[str], str]) -> dict[str, Any]:
    """An optimizer's state with renamed parameters."""
    if not state:
        return {}
    return {
        "state": {rename(name): values for name, values in state["state"].items()},
        "param_groups": [
            {**group, "params": [rename(name) for name in group["params"]]} for group in state["param_groups"]
        ],
    }


def _without_compiler(name: str) -> str:
    """Removes the level that `torch.compile(module)` adds to names."""
    return name.replace("_orig_mod.", "")


def _canonical(name: str) -> str:
    """PyTorch's name of a parameter in these state dicts: without the levels of its wrappers."""
    return _without_compiler(name).replace("_checkpoint_wrapped_module.", "")
