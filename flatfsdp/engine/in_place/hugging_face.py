"""Hugging Face methods and properties that have to tell of the whole model, not of this rank's parts.

In:   a class of transformers, diffusers or PEFT; other classes are left alone.
Out:  replacements for its attributes in the class of a unit or a part.

    dtype, device                    those of compute: listed parameters are in master precision;
                                     during a save, those of the saved values, which are written beside them
    num_parameters and other counts  count the whole model
    save_pretrained                  gathers; the first rank writes; a state dict given is written as it is
    should_save_on_this_rank         true on the first of the ranks that share the model
    resize_token_embeddings          raises: the layout of the parameters is fixed
    generate                         continues on all ranks until the last one has ended (`synced_gpus`)
    methods for adapters             see `adapters.py`
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from flatfsdp.comm.meeting import meet
from flatfsdp.comm.objects import broadcast_object
from flatfsdp.comm.paths import local_path
from flatfsdp.contract.attribute import Attribute
from flatfsdp.contract.whole_shape import WHOLE_SHAPE
from flatfsdp.engine.full_params import whole_units
from flatfsdp.engine.in_place.adapters import computing_by_itself, only_keys, said_of_adapters
from flatfsdp.engine.in_place.parts import unit_of
from flatfsdp.engine.units import distinct_units, root_of
from flatfsdp.flat.sites import Site
from flatfsdp.policy import Gathering

LIBRARIES = ("transformers", "diffusers", "peft")
_SAVED_DTYPE = Attribute[torch.dtype | None]("_flatfsdp_saved_dtype", None)
"""The dtype of what is written, on a model that is being saved."""
COUNTS = ("num_parameters", "get_memory_footprint", "get_nb_trainable_parameters")


def said_by_whole_models(plain: type[nn.Module]) -> dict[str, Any]:
    """Replacements, by name, for the attributes that a class of these libraries has."""
    if not any(base.__module__.split(".")[0] in LIBRARIES for base in plain.__mro__):
        return {}
    found: dict[str, Any] = {
        "dtype": property(lambda self: _SAVED_DTYPE.of(self) or _computed_with(self).dtype),
        "device": property(lambda self: _computed_with(self).device),
        "resize_token_embeddings": _refuse_resizing,
        "should_save_on_this_rank": _is_saved_here,
    }
    for name in COUNTS:
        if hasattr(plain, name):
            found[name] = _counting(getattr(plain, name))
    if hasattr(plain, "save_pretrained"):
        found["save_pretrained"] = _saving(plain.save_pretrained)
    found = {name: value for name, value in found.items() if hasattr(plain, name)}
    if hasattr(plain, "generate"):
        found["_is_fsdp_managed_module"] = property(_generates_together)
        # The compiler reads this from modules that claim to be FSDP's.
        found["_fsdp_use_orig_params"] = True
    return found | said_of_adapters(plain)


def _computed_with(module: nn.Module) -> Tensor:
    """The first parameter as its module has it, rather than as it is listed.

    Raises:
        AttributeError: if there is none of floating-point numbers.
    """
    for owner in module.modules():
        for name, listed in owner._parameters.items():
            tensor = vars(owner).get(name, listed)
            if tensor is not None and tensor.is_floating_point():
                return tensor
    raise AttributeError(f"{type(module).__name__} has no parameter of floating-point numbers")


def _generates_together(module: nn.Module) -> bool:
    """Tells transformers that every forward is collective, so that all ranks generate equally long."""
    return not unit_of(module).fsdp_state.is_kept


def _refuse_resizing(module: nn.Module, *_: Any, **__: Any) -> NoReturn:
    raise RuntimeError(
        f"resize_token_embeddings of a {type(module).__name__} that is sharded: the layout of its parameters "
        "is fixed on all ranks; resize it before flatfsdp.shard"
    )


def _counting(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def counted(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with _whole_shapes(module):
            return method(module, *args, **kwargs)

    return counted


@contextmanager
def _whole_shapes(module: nn.Module) -> Iterator[None]:
    """Context in which parameters are listed with their whole shapes, and without memory."""
    before: list[tuple[Site, nn.Parameter]] = []
    shapes: dict[nn.Parameter, nn.Parameter] = {}
    for owner in module.modules():
        for name, listed in owner._parameters.items():
            if listed is not None and (shape := WHOLE_SHAPE.of(listed)) is not None:
                whole = torch.empty(shape, dtype=listed.dtype, device="meta")
                shapes.setdefault(listed, nn.Parameter(whole, listed.requires_grad))
                before.append((Site(owner, name, name), listed))
    for site, listed in before:
        site.module._parameters[site.attribute] = shapes[listed]
    try:
        yield
    finally:
        for site, listed in before:
            site.module._parameters[site.attribute] = listed


def _saving(method: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(method)

    @functools.wraps(method)
    def save(module: nn.Module, *args: Any, **kwargs: Any) -> None:
        """Gathers the model and writes it on the first rank.  Collective over the ranks that share it.

        With a `state_dict` the call is local: the calling rank writes it, as with a plain model.

        Raises:
            ValueError: if the folder is a URL.
            RuntimeError: if another rank does not call it, or the first one could not write.
        """
        bound = signature.bind(module, *args, **kwargs)
        # A fused head takes `*args` and `**kwargs`.  Without a folder the method itself raises.
        folder = args[0] if args else kwargs.get("save_directory", "")
        given = bound.arguments.get("state_dict", bound.kwargs.get("state_dict"))
        if given is not None:
            local_path(folder)
            with _saved_in(module, given), only_keys(module):
                method(*bound.args, **bound.kwargs)
            return
        state = unit_of(module).fsdp_state
        for ranks in state.grid.dimensions:
            meet(ranks, "save_pretrained", state.policy.timeout)
        problem = None
        root_of(unit_of(module))
        units = distinct_units(unit_of(module))
        with whole_units(units, Gathering(rank0_only=True, offload_to_cpu=True), writeback=False):
            if state.grid.is_first:
                # All that the method asks of inner modules is here now, without the other ranks.
                try:
                    local_path(folder)
                    gathered = module.state_dict()
                    _pass_state_dict(signature, bound, gathered)
                    with _saved_in(module, gathered), computing_by_itself(module):
                        method(*bound.args, **bound.kwargs)
                except Exception as error:
                    problem = error
        said = None if problem is None else f"{type(problem).__name__}: {problem}"
        first = broadcast_object(said, state.grid.dimensions, state.shared.device)
        if problem is not None:
            raise problem
        if first is not None:
            raise RuntimeError(f"save_pretrained failed on the first rank: {first}")

    return save


def _is_saved_here(module: nn.Module, is_main_process: bool) -> bool:
    """Tells transformers 5 whether this rank writes a file."""
    return is_main_process and unit_of(module).fsdp_state.grid.is_first


@contextmanager
def _saved_in(module: nn.Module, values: dict[str, Any]) -> Iterator[None]:
    """Context in which the model's `dtype` is that of these values."""
    tensors = (value for value in values.values() if isinstance(value, Tensor))
    floating = (tensor.dtype for tensor in tensors if tensor.is_floating_point())
    _SAVED_DTYPE.leave(module, next(floating, None))
    try:
        yield
    finally:
        _SAVED_DTYPE.leave(module, None)


def _pass_state_dict(
    signature: inspect.Signature, bound: inspect.BoundArguments, state: dict[str, Tensor]
) -> None:
    """Passes the state dict under its own name, or among the arguments that the method hands on."""
    if "state_dict" in signature.parameters:
        bound.arguments["state_dict"] = state
        return
    kinds = signature.parameters.values()
    others = next(each.name for each in kinds if each.kind is inspect.Parameter.VAR_KEYWORD)
    bound.arguments.setdefault(others, {})["state_dict"] = state
