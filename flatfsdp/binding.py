"""Ties the slots of a flat layout to the places in a module tree where the parameters were registered.

In:   a module and the parameters of one group.
Out:  a `Binding` that can take the parameters out of the tree, put tensors in their place, and, for
      `state_dict`, register real parameters again for a moment.
Next: `flat_params_wrapper.py` and `unshard.py` bind views of their flat buffers through it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from flatfsdp.layout import FlatLayout, ParamSpec


@dataclass(frozen=True)
class Site:
    """One place where a parameter is registered: `getattr(module, attribute)`; `name` is its full path."""

    module: nn.Module
    attribute: str
    name: str


class Binding:
    """The slots of one layout and, for each slot, every site that holds it (tied parameters have several)."""

    def __init__(self, layout: FlatLayout, sites: Sequence[tuple[Site, ...]]) -> None:
        self.layout = layout
        self.sites = tuple(sites)

    @staticmethod
    def of(module: nn.Module, parameters: Iterable[nn.Parameter]) -> Binding:
        """Packs `parameters`, in that order, and finds every site below `module` that holds one of them.

        Raises:
            ValueError: if a parameter is not registered below `module`.
        """
        found: dict[nn.Parameter, list[Site]] = {parameter: [] for parameter in parameters}
        for path, owner in module.named_modules():
            for attribute, parameter in owner._parameters.items():
                if parameter in found:
                    name = f"{path}.{attribute}" if path else attribute
                    found[parameter].append(Site(owner, attribute, name))
        for parameter, sites in found.items():
            if not sites:
                raise ValueError(
                    f"a parameter of shape {tuple(parameter.shape)} is not registered below "
                    f"{type(module).__name__}; pass parameters of the module that is wrapped"
                )
        layout = FlatLayout.pack(ParamSpec(sites[0].name, tuple(p.shape)) for p, sites in found.items())
        return Binding(layout, [tuple(sites) for sites in found.values()])

    def parameters(self) -> list[nn.Parameter]:
        """The registered parameter of each slot; only while they are registered."""
        return [sites[0].module._parameters[sites[0].attribute] for sites in self.sites]  # type: ignore[misc]

    def bind(self, tensors: Sequence[Tensor]) -> None:
        """Makes `site.module.attribute` be the given tensor of its slot, as a plain attribute.

        The attribute is not registered, so `module.parameters()` does not list it: the optimizer sees the
        flat parameter and nothing else.
        """
        for sites, tensor in zip(self.sites, tensors, strict=True):
            for site in sites:
                site.module._parameters.pop(site.attribute, None)
                if isinstance(tensor, nn.Parameter):
                    # Module.__setattr__ would register it again.
                    site.module.__dict__[site.attribute] = tensor
                else:
                    # Through __setattr__, because some layers (RNNs) keep a second list in step there.
                    setattr(site.module, site.attribute, tensor)

    def register(self, parameters: Sequence[nn.Parameter]) -> None:
        """Registers real parameters at every site, in place of what `bind` put there."""
        for sites, parameter in zip(self.sites, parameters, strict=True):
            for site in sites:
                site.module.__dict__.pop(site.attribute, None)
                site.module.register_parameter(site.attribute, parameter)
