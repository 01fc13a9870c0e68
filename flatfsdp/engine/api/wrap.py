"""Policies that pick modules as units."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from flatfsdp.contract.transparent import unwrapped
from flatfsdp.engine.build.build_unit import own_modules
from flatfsdp.engine.whole.units import UnitModule

WrapPolicy = Callable[[str, nn.Module, int], bool]
"""(name, module, parameters below it that no inner unit has taken) -> whether it becomes a unit."""


def by_class(*classes: type[nn.Module]) -> WrapPolicy:
    """Policy that picks every module of one of these classes, such as a transformer's layer class."""
    if not classes or not all(isinstance(c, type) and issubclass(c, nn.Module) for c in classes):
        raise ValueError(f"by_class takes one or more nn.Module classes, not {classes!r}")
    return lambda name, module, numel: isinstance(module, classes)


def by_size(min_numel: int) -> WrapPolicy:
    """Policy that picks every module with at least `min_numel` parameters that no inner unit has taken.

    Containers whose `forward` is never called (ModuleList, ModuleDict) are not picked.
    """
    if min_numel < 1:
        raise ValueError(f"by_size takes a positive number of parameters, not {min_numel}")
    containers = (nn.ModuleList, nn.ModuleDict)
    return lambda name, module, numel: numel >= min_numel and not isinstance(module, containers)


Places = list[tuple[nn.Module, str, str]]
"""Where a module is a child: parent, name there, and path in the model.  A shared one has several places."""


def pick_units(model: nn.Module, policy: WrapPolicy) -> dict[nn.Module, Places]:
    """The modules below `model` that become units, inner ones first; nothing is changed.

    Raises:
        TypeError: if the policy is a class or cannot be called.
        ValueError: if the policy picks nothing.
    """
    if isinstance(policy, type) or not callable(policy):
        raise TypeError(f"the wrap policy is {policy!r}; pass by_class(...), by_size(...) or a function")
    picked: dict[nn.Module, Places] = {}
    taken: set[nn.Parameter] = set()

    def visit(parent: nn.Module, prefix: str) -> None:
        for child_name, child in parent._modules.items():
            if child is None or isinstance(unwrapped(child), UnitModule):
                continue
            name = f"{prefix}{child_name}"
            if child not in picked:
                # Inner ones first: what they take does not count as this one's.
                # MultiheadAttention computes with its children's parameters without calling them.
                if not isinstance(child, nn.MultiheadAttention):
                    visit(child, f"{name}.")
                owned = (each._parameters.values() for _, each in own_modules(child))
                left = {p for of_module in owned for p in of_module if p is not None} - taken
                if policy(name, child, sum(parameter.numel() for parameter in left)):
                    picked[child] = []
                    taken.update(left)
            if child in picked:
                picked[child].append((parent, child_name, name))

    visit(model, "")
    if not picked:
        raise ValueError(
            "the wrap policy picked no module, so the whole model would be one unit; pick a smaller class or "
            "size, or call FlatFSDP(model), or shard(model) in place, if that is what you want"
        )
    return picked
