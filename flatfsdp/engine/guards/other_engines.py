"""Refuses others that would keep the same parameters: engines, and adapters that replace parameters.

In:   a module that is given to another engine, or that another one has; what another engine does to a unit.
Out:  ValueError in the offending call, before anything has changed, which says what to do instead.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from flatfsdp.contract.claimed import is_unit

_WRAPPERS = ("DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "DeepSpeedEngine")
"""Class names of wrapping engines; PyTorch, apex, Megatron and others share them."""

_STATES = {"FSDPState": "fully_shard", "ReplicateState": "replicate", "_ReplicateState": "replicate"}
"""Classes of the objects that an engine without a wrapper hooks into a module -> that engine's name."""

_MARK = "_is_fsdp_managed_module"
"""Attribute that FullyShardedDataParallel sets first, and fully_shard last, on every module inside.  By then
fully_shard has replaced the listed parameters, but not written to them."""


class _Undistributed:
    """In the place of a mark that `parallelize_module` reads before it cuts a module's parameters."""

    def __bool__(self) -> bool:
        raise _around("parallelize_module")


def refuse_distribution(module: nn.Module) -> None:
    """Lets `parallelize_module` of a module in a unit raise, which would cut this rank's shards anew."""
    vars(module)["_distribute_module_applied"] = _Undistributed()


class Guarded(nn.Module):
    """A unit that refuses what other engines do to a module before they shard or reduce its parameters."""

    def register_forward_pre_hook(self, hook: Callable[..., Any], **options: Any) -> RemovableHandle:
        """Registers a hook, unless it is another engine's; see nn.Module.

        Raises:
            ValueError: if another engine registers it.
        """
        if (engine := _engine_of(hook)) is not None:
            raise _around(engine)
        return super().register_forward_pre_hook(hook, **options)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == _MARK and value:
            raise _around("FullyShardedDataParallel, or fully_shard,")
        if isinstance(value, nn.Parameter) and _name_among({"DTensor"}, type(value)):
            raise _around("fully_shard or parallelize_module")
        super().__setattr__(name, value)


def refuse_engine_around(parent: nn.Module, _name: str, value: nn.Module | None) -> None:
    """Checks a module before it becomes a child of `parent`.

    Raises:
        ValueError: if `parent` is another engine, and there is a unit in `value`.
    """
    engine = _wrapper_name(parent)
    if engine is not None and value is not None and any(map(is_unit, value.modules())):
        raise _around(engine)


def refuse_others_inside(name: str, module: nn.Module) -> None:
    """Checks a module before a unit takes its parameters.

    Raises:
        ValueError: if another engine keeps them, or if PEFT adapts a parameter, rather than a layer: LoRA of
            parameters, as of MoE routers, replaces them in each forward.
    """
    name, kind = name or "the module", type(module)
    hooked = map(_engine_of, module._forward_pre_hooks.values())
    engine = _wrapper_name(module) or next(filter(None, hooked), None)
    if engine is not None:
        raise ValueError(
            f"{name} is in the hands of {engine} already, which reduces its gradients by itself; give "
            "FlatFSDP the plain module, which it shards and reduces alone"
        )
    if kind.__name__ == "ParamWrapper" and kind.__module__.startswith("peft."):
        base = type(module.get_base_layer()).__name__  # type: ignore[operator]
        raise ValueError(
            f"PEFT adapts a parameter of {name} ({module.parameter_name} of a {base}), and puts another one "
            'in its place in each forward. Adapt linear layers, as in target_modules=["q_proj", "v_proj"], '
            'and no routers or experts: "all-linear" includes routers, and target_parameters are such ones'
        )


def _wrapper_name(module: nn.Module) -> str | None:
    """Name of the engine whose wrapper `module` is; None for other modules and for our units."""
    # Our fairscale-compatible wrapper has a class of such a name.
    return None if isinstance(module, Guarded) else _name_among(_WRAPPERS, type(module))


def _engine_of(hook: Callable[..., Any]) -> str | None:
    """Name of the wrapper-less engine that a hook belongs to; None if it belongs to none."""
    # Engines keep the compiler out of their hooks by a decorator, behind which is a method of their state.
    method = inspect.unwrap(hook, stop=lambda each: hasattr(each, "__self__"))
    return _STATES.get(_name_among(_STATES, type(getattr(method, "__self__", None))) or "")


def _name_among(names: Container[str], cls: type) -> str | None:
    """The first of these names that `cls` or one of its bases has: others' classes may derive from it."""
    return next((base.__name__ for base in cls.__mro__ if base.__name__ in names), None)


def _around(engine: str) -> ValueError:
    return ValueError(
        f"{engine} around a model that FlatFSDP has sharded would take this rank's shards for a whole model, "
        "and reduce gradients a second time. Accelerator.prepare, transformers.Trainer and Lightning's "
        "strategies put one around every model: give them all but the model, and call the model itself"
    )
