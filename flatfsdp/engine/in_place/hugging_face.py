"""What classes of Hugging Face say of themselves: of a model that is sharded in place, the whole model's.

In:   a class of transformers, diffusers or PEFT; those of others are left alone.
Out:  what stands in its place in the class of a unit or a part.

    dtype, device                    what it computes with; the listed parts are in master precision
    num_parameters and other counts  of the whole model, not of this rank's parts
    save_pretrained                  gathers, and the first rank writes
    resize_token_embeddings          raises: the parameters have their places
    generate                         goes on on all ranks until the last one has ended (`synced_gpus`)
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
from flatfsdp.comm.objects import all_gather_object
from flatfsdp.comm.ranks import Ranks, default_group
from flatfsdp.contract.whole_shape import WHOLE_SHAPE
from flatfsdp.engine.full_params import state_dicts_gathered
from flatfsdp.engine.in_place.parts import unit_of
from flatfsdp.flat.sites import Site
from flatfsdp.policy import Gathering

LIBRARIES = ("transformers", "diffusers", "peft")
COUNTS = ("num_parameters", "get_memory_footprint", "get_nb_trainable_parameters")


def said_by_whole_models(plain: type[nn.Module]) -> dict[str, Any]:
    """What takes the place of attributes that a class of these libraries has, by name."""
    if not any(base.__module__.split(".")[0] in LIBRARIES for base in plain.__mro__):
        return {}
    found: dict[str, Any] = {
        "dtype": property(lambda self: _computed_with(self).dtype),
        "device": property(lambda self: _computed_with(self).device),
        "resize_token_embeddings": _refuse_resizing,
    }
    for name in COUNTS:
        if hasattr(plain, name):
            found[name] = _counting(getattr(plain, name))
    if hasattr(plain, "save_pretrained"):
        found["save_pretrained"] = _saving(plain.save_pretrained)
    found = {name: value for name, value in found.items() if hasattr(plain, name)}
    if hasattr(plain, "generate"):
        found["_is_fsdp_managed_module"] = property(_generates_together)
        # Asked of modules that say so, by the compiler.
        found["_fsdp_use_orig_params"] = True
    return found


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
    """Whether each of its forwards is collective, as transformers asks before it generates."""
    return not unit_of(module).fsdp_state.unit.is_kept


def _refuse_resizing(module: nn.Module, *_: Any, **__: Any) -> NoReturn:
    raise RuntimeError(
        f"resize_token_embeddings of a {type(module).__name__} that is sharded: its parameters have their "
        "places on all ranks; resize it before flatfsdp.shard"
    )


def _counting(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def counted(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with _whole_shapes(module):
            return method(module, *args, **kwargs)

    return counted


@contextmanager
def _whole_shapes(module: nn.Module) -> Iterator[None]:
    """Inside, parameters are listed in their whole shapes, and have no memory."""
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
        """Gathers the model, and writes it on the first rank.  Collective over all ranks.

        Raises:
            RuntimeError: if another rank does not call it, or the first one could not write.
        """
        world, device = Ranks.of(default_group()), unit_of(module).fsdp_state.device
        meet(world, "save_pretrained")
        bound = signature.bind(module, *args, **kwargs)
        if _state_dict_of(signature, bound) is None:
            with state_dicts_gathered(Gathering(rank0_only=True, offload_to_cpu=True)):
                _pass_state_dict(signature, bound, module.state_dict())
        problem = None
        if world.rank == 0:
            try:
                method(*bound.args, **bound.kwargs)
            except Exception as error:
                problem = error
        said = None if problem is None else f"{type(problem).__name__}: {problem}"
        first = all_gather_object(said, world, device)[0]
        if problem is not None:
            raise problem
        if first is not None:
            raise RuntimeError(f"save_pretrained failed on the first rank: {first}")

    return save


def _state_dict_of(signature: inspect.Signature, bound: inspect.BoundArguments) -> Any:
    return bound.arguments.get("state_dict", bound.kwargs.get("state_dict"))


def _pass_state_dict(
    signature: inspect.Signature, bound: inspect.BoundArguments, state: dict[str, Tensor]
) -> None:
    """As an argument of this name, or among those that the method hands on."""
    if "state_dict" in signature.parameters:
        bound.arguments["state_dict"] = state
        return
    kinds = signature.parameters.values()
    others = next(each.name for each in kinds if each.kind is inspect.Parameter.VAR_KEYWORD)
    bound.arguments.setdefault(others, {})["state_dict"] = state
