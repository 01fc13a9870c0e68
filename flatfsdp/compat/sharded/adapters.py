"""Methods of PEFT's models that handle adapters: adapted to in-place sharding, or refused with a way out.

In:   a class of PEFT, or of transformers, which has some of these methods, too.
Out:  replacements for these methods in the class of a unit or a part.

    merge_adapter, unmerge_adapter            run with whole parameters, which are written back to the shards
    merge_and_unload, unload, delete_adapter  refused: they would remove sharded modules
    add_adapter, load_adapter                 refused for new adapters: their parameters would not be sharded
    set_adapter                               allowed as long as it does not change what is trained
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import nn

from flatfsdp.engine.api.methods import unit_of

_REPLACES = "sharded modules would leave the model"
_PLAIN = "save_pretrained(folder) on all ranks, and call it of what plain PEFT makes of the folder"
_REFUSED = {
    "merge_and_unload": f"{_REPLACES}; with merge_adapter() they stay. Or {_PLAIN}",
    "unload": f"{_REPLACES}; inside disable_adapter() they stay. Or {_PLAIN}",
    "delete_adapter": f"{_REPLACES}; leave the adapter inactive. Or {_PLAIN}",
    "add_adapter": "the parameters that it brings would be neither sharded nor reduced; add all adapters "
    "before flatfsdp.shard",
}


def refusing(name: str, why: str, _method: object = None) -> Callable[..., NoReturn]:
    """A method that raises RuntimeError, in the place of the method of this name."""

    def refuse(module: nn.Module, *_: Any, **__: Any) -> NoReturn:
        raise RuntimeError(f"{name} of a {type(module).__name__} that is sharded: {why}")

    return refuse


def _with_whole_parameters(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Collective over the ranks that share the model."""
        with unit_of(module).summon_full_params():
            return method(module, *args, **kwargs)

    return call


def _into_its_place(method: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(method)

    @functools.wraps(method)
    def load_adapter(module: Any, *args: Any, **kwargs: Any) -> Any:
        name = signature.bind(module, *args, **kwargs).arguments.get("adapter_name", "default")
        if name not in getattr(module, "peft_config", {}):
            refusing("load_adapter", _REFUSED["add_adapter"])(module)
        return method(module, *args, **kwargs)

    return load_adapter


def _as_trained(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def set_adapter(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Chooses which adapters compute; what is trained stays as it was when the model was sharded.

        Raises:
            RuntimeError: if other adapters would be trained afterwards.  Where gradients are switched off,
                nobody asks for that: TRL turns to the reference's adapter there, and back.
        """
        # PEFT also freezes the adapters that it does not choose; what is trained is to stay as it is.
        before = [(parameter, parameter.requires_grad) for parameter in module.parameters()]
        result = method(module, *args, **kwargs)
        changed = any(parameter.requires_grad != trains for parameter, trains in before)
        for parameter, trains in before:
            parameter.requires_grad_(trains)
        if changed and torch.is_grad_enabled() and not kwargs.get("inference_mode"):
            raise RuntimeError(
                f"set_adapter of a sharded {type(module).__name__} would change which adapters are trained, "
                "and a unit is frozen as a whole; call it before flatfsdp.shard, or with inference_mode=True "
                "or inside torch.no_grad(), which leave that as it is"
            )
        return result

    return set_adapter


OF_ADAPTERS: dict[str, Callable[[Any], Any]] = {
    "merge_adapter": _with_whole_parameters,
    "unmerge_adapter": _with_whole_parameters,
    "load_adapter": _into_its_place,
    "set_adapter": _as_trained,
    **{name: functools.partial(refusing, name, why) for name, why in _REFUSED.items()},
}
"""What makes the replacement of each method from the method itself, by name."""


@contextmanager
def only_keys(module: Any) -> Iterator[None]:
    """Context in which state dicts of parts are local, with this rank's parts: PEFT asks for their keys.

    Raises:
        RuntimeError: if PEFT would ask for values, which all ranks have to gather.
    """
    configs = getattr(module, "peft_config", {}).values()
    if any(config.is_prompt_learning for config in configs):
        raise RuntimeError(
            "save_pretrained(state_dict=...) of a sharded model with prompt learning: the prompts are "
            "computed; call it on all ranks, without state_dict"
        )
    state = unit_of(module).fsdp_state
    # Nothing is gathered: the other ranks are not here, and only the keys are read.
    before, state.is_whole = state.is_whole, True
    try:
        yield
    finally:
        state.is_whole = before
