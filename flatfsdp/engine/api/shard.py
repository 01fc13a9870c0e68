"""`shard`: shards a model in place; it stays the same object, and an instance of its class.

In:   a module, and a policy that picks the modules inside that become units.
Out:  the same module.  Its parameters are listed as this rank's parts, under their own names.
Next: `engine/build/build_unit.py` takes the parameters; `classes.py` extends the module's own class.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from torch import nn
from typing_extensions import Unpack

from flatfsdp.comm.grid import mesh_of_shard_groups
from flatfsdp.contract.claimed import FSDP_STATE, PART_OF
from flatfsdp.contract.foreign_words import OPTIONS, answering
from flatfsdp.contract.mixed import mix, unmix
from flatfsdp.engine.api.classes import FlatFSDPModule, FlatFSDPPart, call_unit, require_mixable
from flatfsdp.engine.api.methods import unit_of
from flatfsdp.engine.api.wrap import WrapPolicy, pick_units
from flatfsdp.engine.build.build_unit import build_unit, own_modules, parameters_to_take
from flatfsdp.engine.whole.units import UnitModule, distinct_units
from flatfsdp.options import Options, default_precision, require_known

M = TypeVar("M", bound=nn.Module)


@answering(OPTIONS)
def shard(module: M, policy: WrapPolicy | None = None, **options: Unpack[Options]) -> M:
    """Shards a module's parameters over ranks, in place: class, methods and names stay what they are.

        model = shard(model, by_class(LlamaDecoderLayer))
        optimizer = torch.optim.AdamW(model.parameters())
        model(tokens).loss.backward()

    `named_parameters()` lists each parameter under its own name, as its local shard: 1-D, in master
    precision, empty where the rank has none of it.  Gradients come to the `.grad` of these.  An attribute,
    such as `module.weight`, is the whole parameter while its unit computes, and reads as NaN otherwise.

    The module has the methods of `FlatFSDP` now: `no_sync`, `clip_grad_norm_`, `summon_full_params`, ...
    Its own methods may call the modules inside.  Register a method with `register_forward_method` if it reads
    a parameter itself, or if it belongs to a module inside that became a unit.  `module.fsdp_state.shared` is
    what its units share: the `microbatch` that the model is in, the `ledger` of the bytes that it has moved.

    Args:
        module: module to shard, the same on all ranks.
        policy: `by_class`, `by_size`, or any callable of (name, module, numel), as for `auto_wrap`.  Every
            module that it picks becomes a unit: gathered, resharded and reduced as a whole.  None makes
            one unit of the module, with everything inside that is not sharded yet.
        options: ranks, dtypes and other settings, by name: see `Options`.  With
            optimize_backward_concat=True, the default, `module.weight` is a Parameter.

    Returns:
        `module`.

    Raises:
        TypeError: if `module` is no module; if the policy is a class or cannot be called; for an unknown
            option; if no class can be derived from the module's class.
        ValueError: if the policy picks nothing; if the module is sharded or wrapped already, or is never
            called; for parameters that cannot be sharded, naming them: not floating point, tied to one in
            another unit, on a device that the backend cannot reach, on the meta device and not initialised,
            split over other ranks than tp_group, float64 or fp16 without `precision`; if ranks of tp_group
            are data-parallel, too.
    """
    require_known("shard", options)
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"shard takes a module, and then the policy, not a {type(module).__name__} first. Several "
            "modules are one unit as parts of the module around them: shard that one; or shard each by itself"
        )
    return make_units(module, policy, make_unit, options)


def make_units(model: nn.Module, policy: WrapPolicy | None, make: Callable[..., M], options: Options) -> M:
    """Makes units of the modules that the policy picks, inner ones first, and of the model; returns the last.

    Args:
        make: function of a module and options that makes the unit; if it returns another object, that takes
            the module's places.

    Raises:
        TypeError, ValueError: as `shard`, with the unit's name.
    """
    # All that can be known is raised before anything changes.
    _require_shardable(model)
    picked = {} if policy is None else pick_units(model, policy)
    for module in picked:
        _require_shardable(module)
    parameters = parameters_to_take(model)
    if options.get("precision") is None:
        # Of the model as a whole: a unit with nothing but a router would take that one's dtype.
        options["precision"] = default_precision(parameters)
    if (dp_shard := options.pop("dp_shard", None)) is not None:
        instead = [name for name in ("mesh", "tp_group") if options.get(name) is not None]
        if instead:
            raise ValueError(
                f"dp_shard arranges all ranks, and there is {instead[0]}, too; leave dp_shard out, and pass "
                "mesh=make_mesh(dp_shard=..., dp_replicate=..., tp=...).dp"
            )
        options["mesh"] = mesh_of_shard_groups(dp_shard)
    for module, places in picked.items():
        try:
            unit = make(module, **options)
        except ValueError as error:
            # The message names parameters as they are called inside the unit.
            raise ValueError(f"{places[0][2]}: {error}") from error
        if unit is not module:
            for parent, name, _ in places:
                setattr(parent, name, unit)
    return make(model, **options)


def register_forward_method(module: nn.Module, name: str) -> None:
    """Lets `module.<name>(...)` compute with whole parameters, as `module(...)` does.

    Args:
        module: a module that is sharded in place, or a module inside it that is not in a unit of its own.
        name: name of the method.

    Raises:
        TypeError: if the module is neither of these.
        AttributeError: if it has no such method.
    """
    unit, method = unit_of(module), getattr(module, name)

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        return call_unit(unit, method, args, kwargs)

    module.__dict__[name] = call


def _require_shardable(module: nn.Module) -> None:
    """Checks that `module` can become a unit and the modules it calls its parts; changes nothing.

    Raises:
        TypeError: if no class can be derived from the class of one of them.
        ValueError: if `module` is a unit already, or is never called.
    """
    if isinstance(module, UnitModule):
        raise ValueError(f"this {type(module).__name__} is sharded already")
    if type(module).__name__ == "OptimizedModule":
        raise ValueError(
            "this is the result of torch.compile, and its parameters are another module's; shard that one, "
            "then compile the blocks that are units: block.compile()"
        )
    if not _is_called(module):
        raise ValueError(
            f"a {type(module).__name__} is never called, so nobody gathers it; pick what is in or around it"
        )
    require_mixable(module, FlatFSDPModule)
    for _, below in own_modules(module):
        if below is not module and _may_be_part(below):
            require_mixable(below, FlatFSDPPart)


def make_unit(module: M, *, lists_flat: bool = False, **options: Unpack[Options]) -> M:
    """Makes a unit of a module that can be one, with everything inside that is not sharded yet; returns it.

    Args:
        lists_flat: whether a wrapper lists flat parameters, and modules list none.

    Raises:
        TypeError, ValueError: as `shard`.
    """
    # Before `module` is a unit itself, which would count.
    inside = distinct_units(module)
    # A part gathers the unit when it is called by itself.  In a block its children are enough: they call what
    # is deeper.  In a model around units, a method may reach further down: `self.decoder.embed(tokens)`.
    below = [each for _, each in own_modules(module)][1:] if inside else _children(module)
    parts = [each for each in dict.fromkeys(below) if _may_be_part(each)]
    state = build_unit(module, options, lists_flat=lists_flat)
    FSDP_STATE.leave(module, state)
    mix(module, FlatFSDPModule)
    assert isinstance(module, FlatFSDPModule)
    for unit in inside:
        if unit.fsdp_state.outer is None:
            unit.fsdp_state.outer = weakref.ref(module)
            if len(distinct_units(unit)) == 1:
                # `module` alone calls it, which may then be compiled whole.
                for _, below_it in own_modules(unit):
                    if isinstance(below_it, FlatFSDPPart):
                        unmix(below_it)
    for part in parts:
        PART_OF.leave(part, weakref.ref(module))
        mix(part, FlatFSDPPart)
    return module


def _children(module: nn.Module) -> Iterator[nn.Module]:
    """Modules that `module` presumably calls itself: its children, and those in lists of modules."""
    for child in module.children():
        if _is_called(child):
            yield child
        else:
            yield from _children(child)


def _is_called(module: nn.Module) -> bool:
    """Whether the module has a forward; lists of modules have none."""
    return "forward" in vars(module) or type(module).forward is not nn.Module.forward


def _may_be_part(module: nn.Module) -> bool:
    """Whether the module can be a part; a loss or a metric, without parameters, needs no gather or cast."""
    return _is_called(module) and next(module.parameters(), None) is not None
