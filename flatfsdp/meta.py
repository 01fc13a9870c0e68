"""Modules that were built on the meta device get memory and values just before their unit is sharded.

So a model that no single device could hold is built one unit at a time: `with torch.device("meta"): model =
GPT(config)`, then `auto_wrap(model, ..., device="cuda")`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from flatfsdp.binding import Site, assign

ParamInit = Callable[[nn.Module], None]
"""Initialises the parameters and buffers that a module owns directly."""


def materialize(
    owners: Iterable[tuple[str, nn.Module]], device: torch.device, init: ParamInit | None
) -> None:
    """Gives memory on `device` to the meta parameters and buffers of these modules, and initialises them.

    Each module that directly owns some is initialised once, children before parents: by `init`, or else by
    its `reset_parameters()`.  What is not on the meta device stays as it is, unless its owner's
    initialisation covers it too.  Tied parameters stay tied.

    Args:
        owners: (path, module), parents before children.

    Raises:
        ValueError: if a module cannot be initialised, or something is left uninitialised, naming it.
    """
    made: dict[Tensor, Tensor] = {}
    to_initialise: list[tuple[str, nn.Module]] = []
    for path, owner in owners:
        if _materialize_own(owner, device, made):
            to_initialise.append((path, owner))
    with torch.no_grad():
        for path, owner in reversed(to_initialise):
            _initialise(path, owner, init)
    for path, owner in to_initialise:
        _check_initialised(path, owner, set(made.values()))


def _materialize_own(owner: nn.Module, device: torch.device, made: dict[Tensor, Tensor]) -> bool:
    """Whether the module directly owns something on the meta device; each tensor is made once."""
    found = False
    for tensors in (owner._parameters, owner._buffers):
        for name, tensor in list(tensors.items()):
            if tensor is None or not tensor.is_meta:
                continue
            found = True
            if tensor not in made:
                made[tensor] = _empty_like(tensor, device)
            assign(Site(owner, name, name), made[tensor])
    return found


def _empty_like(tensor: Tensor, device: torch.device) -> Tensor:
    """Not-a-number where it can be, so that what nobody initialises is noticed."""
    data = torch.empty_like(tensor, device=device).detach()
    if data.is_floating_point():
        data.fill_(torch.nan)
    if not isinstance(tensor, nn.Parameter):
        return data
    parameter = nn.Parameter(data, tensor.requires_grad)
    parameter.__dict__.update(tensor.__dict__)
    return parameter


def _initialise(path: str, owner: nn.Module, init: ParamInit | None) -> None:
    if init is not None:
        init(owner)
        return
    # nn.MultiheadAttention and nn.Transformer spell it with an underscore.
    reset = getattr(owner, "reset_parameters", None) or getattr(owner, "_reset_parameters", None)
    if reset is None:
        raise ValueError(
            f"{path or 'the module'} ({type(owner).__name__}) is on the meta device and has no "
            "reset_parameters(); pass param_init_fn= to say how to initialise it"
        )
    reset()


def _check_initialised(path: str, owner: nn.Module, made: set[Tensor]) -> None:
    for name, tensor in [*owner._parameters.items(), *owner._buffers.items()]:
        if tensor in made and tensor.is_floating_point() and bool(tensor.isnan().any()):
            raise ValueError(
                f"{path}.{name}".lstrip(".")
                + " was built on the meta device and is still uninitialised after "
                f"param_init_fn or reset_parameters() of {type(owner).__name__}; initialise it there"
            )
