"""Gives memory and values to modules built on the meta device, just before their unit is sharded.

A model that no single device could hold is thus built one unit at a time: `with torch.device("meta"): model =
GPT(config)`, then `auto_wrap(model, ..., device="cuda")`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from flatfsdp.flat.sites import Site, assign

ParamInit = Callable[[nn.Module], None]
"""Function that initialises the parameters and buffers that a module owns directly.

A function with a true attribute `after_children` is also called for modules that own none, such as a layer
whose projections need special values: for each module of a unit, children before parents.
"""


def is_on_meta(owner: nn.Module) -> bool:
    """Whether the module directly owns a parameter or buffer on the meta device."""
    return any(tensor.is_meta for _, tensor in _own_tensors(owner))


def materialize(
    modules: Iterable[tuple[str, nn.Module]], device: torch.device, init: ParamInit | None
) -> None:
    """Allocates the meta parameters and buffers of these modules on `device`, and initialises them.

    Each module that directly owns some is initialised once, children before parents: by `init`, or else by
    its `reset_parameters()`.  Tensors on real devices stay as they are, unless their owner's initialisation
    covers them, too.  Tied parameters stay tied.

    Args:
        modules: (path, module) pairs, parents before children.
        device: where to allocate; the meta device leaves everything as it is, for models that are only
            planned.
        init: initialises what a module owns directly; None: its `reset_parameters()`.

    Raises:
        ValueError: if a module cannot be initialised, or a tensor is left uninitialised, naming it; the
            modules are then as they were.
    """
    if device.type == "meta":
        return
    modules = list(modules)
    on_meta = [(path, owner) for path, owner in modules if is_on_meta(owner)]
    # Before anything is allocated, which a refusal would have to free again.
    if init is None:
        for path, module in modules:
            _check_initialises_itself(path, module)
    initialise, is_for_all = init or _reset, getattr(init, "after_children", False)
    replaced = [(owner, name, t) for _, owner in on_meta for name, t in _own_tensors(owner) if t.is_meta]
    # By tensor, so that tied parameters stay tied.
    made = {tensor: _empty_like(tensor, device) for _, _, tensor in replaced}
    for owner, name, tensor in replaced:
        assign(Site(owner, name, name), made[tensor])
    try:
        with torch.no_grad():
            for path, module in reversed(modules):
                if (path, module) in on_meta or (is_for_all and not _own_tensors(module)):
                    initialise(module)
        for path, owner in on_meta:
            _check_initialised(path, owner, set(made.values()))
    except BaseException:
        for owner, name, tensor in replaced:
            assign(Site(owner, name, name), tensor)
        raise


def _own_tensors(owner: nn.Module) -> list[tuple[str, Tensor]]:
    named = [*owner._parameters.items(), *owner._buffers.items()]
    return [(name, tensor) for name, tensor in named if tensor is not None]


def _empty_like(tensor: Tensor, device: torch.device) -> Tensor:
    """Allocates a tensor, filled with NaN if its dtype has one, so that a missing initialisation shows."""
    data = torch.empty_like(tensor, device=device).detach()
    if data.is_floating_point():
        data.fill_(torch.nan)
    if not isinstance(tensor, nn.Parameter):
        return data
    parameter = nn.Parameter(data, tensor.requires_grad)
    parameter.__dict__.update(tensor.__dict__)
    return parameter


def _reset_of(owner: nn.Module) -> Callable[[], None] | None:
    # nn.MultiheadAttention and nn.Transformer have it with an underscore.
    return getattr(owner, "reset_parameters", None) or getattr(owner, "_reset_parameters", None)


def _check_initialises_itself(path: str, module: nn.Module) -> None:
    """Raises ValueError if there is no `reset_parameters`, or if the model would initialise otherwise."""
    name = f"{path or 'the module'} ({type(module).__name__})"
    if type(module).__module__.startswith("transformers."):
        raise ValueError(
            f"{name} is a module of transformers on the meta device, which its model initialises; pass "
            "param_init_fn=flatfsdp.compat.transformers.init_weights_of(model)"
        )
    if is_on_meta(module) and _reset_of(module) is None:
        raise ValueError(f"{name} is on the meta device and has no reset_parameters(); pass param_init_fn=")


def _reset(owner: nn.Module) -> None:
    reset = _reset_of(owner)
    assert reset is not None
    reset()


def _check_initialised(path: str, owner: nn.Module, made: set[Tensor]) -> None:
    for name, tensor in _own_tensors(owner):
        if tensor not in made or tensor.numel() == 0:
            continue
        # Integers have no NaN, but writing them raises their version.
        forgotten = tensor.isnan().any() if tensor.is_floating_point() else tensor._version == 0
        if bool(forgotten):
            raise ValueError(
                f"{f'{path}.{name}'.lstrip('.')} was built on the meta device and is still uninitialised "
                f"after param_init_fn or reset_parameters() of {type(owner).__name__}; initialise it there"
            )
