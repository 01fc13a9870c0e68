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
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from flatfsdp.comm.meeting import meet
from flatfsdp.comm.objects import broadcast_object
from flatfsdp.comm.paths import local_path
from flatfsdp.compat.sharded.adapters import OF_ADAPTERS, only_keys, refusing
from flatfsdp.contract.attribute import Attribute
from flatfsdp.contract.whole_shape import WHOLE_SHAPE
from flatfsdp.engine.api.methods import unit_of
from flatfsdp.engine.whole.full_params import whole_units
from flatfsdp.engine.whole.units import distinct_units, root_of
from flatfsdp.options import Gathering

_SAVED_DTYPE = Attribute[torch.dtype | None]("_flatfsdp_saved_dtype", None)
"""The dtype of what is written, on a model that is being saved."""


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


def _counting(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def counted(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Counts parameters that are listed with their whole shapes, and without memory."""
        listed = [(p, shape) for p in module.parameters() if (shape := WHOLE_SHAPE.of(p)) is not None]
        whole = {
            p: nn.Parameter(torch.empty(shape, dtype=p.dtype, device="meta"), p.requires_grad)
            for p, shape in listed
        }
        _list(module, whole)
        try:
            return method(module, *args, **kwargs)
        finally:
            _list(module, {each: p for p, each in whole.items()})

    return counted


def _list(module: nn.Module, instead: dict[nn.Parameter, nn.Parameter]) -> None:
    """Lists other parameters instead of those that are listed now; reading them as attributes stays."""
    for owner in module.modules():
        for name, listed in owner._parameters.items():
            if listed is not None:
                owner._parameters[name] = instead.get(listed, listed)


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
        given = bound.arguments.pop("state_dict", bound.kwargs.get("state_dict"))

        def write(values: dict[str, Any]) -> None:
            local_path(folder)
            tensors = (value for value in values.values() if isinstance(value, Tensor))
            floating = (tensor.dtype for tensor in tensors if tensor.is_floating_point())
            _SAVED_DTYPE.leave(module, next(floating, None))
            try:
                method(*bound.args, **{**bound.kwargs, "state_dict": values})
            finally:
                _SAVED_DTYPE.leave(module, None)

        if given is not None:
            with only_keys(module):
                write(given)
            return
        unit = unit_of(module)
        state = unit.fsdp_state
        # A rank that saves alone raises here; its gather would pair with whatever the others do next.
        for ranks in state.grid.dimensions:
            meet(ranks, "save_pretrained", state.policy.timeout)
        problem = None
        root_of(unit)
        gathering = Gathering(rank0_only=True, offload_to_cpu=True)
        with whole_units(distinct_units(unit), gathering, writeback=False):
            if state.grid.is_first:
                # All that the method asks of inner modules is here now, without the other ranks.  So parts
                # compute by themselves meanwhile, as inside a call: prompt encoders are computed to be saved.
                state.uses += 1
                try:
                    write(module.state_dict())
                except Exception as error:
                    problem = error
                finally:
                    state.uses -= 1
        # The others wait here until the file is written, and learn whether it was.
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


_OF_MODELS: dict[str, Callable[[Any], Any]] = {
    "dtype": lambda _: property(lambda self: _SAVED_DTYPE.of(self) or _computed_with(self).dtype),
    "device": lambda _: property(lambda self: _computed_with(self).device),
    "num_parameters": _counting,
    "get_memory_footprint": _counting,
    "get_nb_trainable_parameters": _counting,
    "save_pretrained": _saving,
    "should_save_on_this_rank": lambda _: _is_saved_here,
    "resize_token_embeddings": functools.partial(
        refusing,
        "resize_token_embeddings",
        "the layout of its parameters is fixed on all ranks; resize it before flatfsdp.shard",
    ),
}
"""What makes the replacement of each attribute from the attribute itself, by name."""


def attributes_for(plain: type[nn.Module]) -> dict[str, Any]:
    """Replacements, by name, for the attributes that a class of these libraries has."""
    # A layer of PEFT has methods of these names, too, which the model around it calls.
    adapters = {} if hasattr(plain, "adapter_layer_names") else OF_ADAPTERS
    makers = (_OF_MODELS | adapters).items()
    found = {name: make(getattr(plain, name)) for name, make in makers if hasattr(plain, name)}
    if hasattr(plain, "generate"):
        # Every forward is collective, so that transformers lets all ranks generate equally long.
        found["_is_fsdp_managed_module"] = property(lambda self: not unit_of(self).fsdp_state.is_kept)
        # The compiler reads this from modules that claim to be FSDP's.
        found["_fsdp_use_orig_params"] = True
    return found
