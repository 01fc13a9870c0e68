"""Ties the slots of a flat layout to the places in a module tree where the parameters were registered.

In:   a module and the parameters of one group.
Out:  a `Binding` that takes the parameters out of the tree, puts tensors in their place, and registers real
      parameters again for a moment, for `state_dict`.
Next: `flatten_params.py` and `engine/storage/group.py` bind views of their flat buffers through it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import repeat
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from flatfsdp.comm.ranks import ALONE, Ranks
from flatfsdp.contract.placement import partition_of, placement_of
from flatfsdp.contract.tensor_parallel import SKIP_BACKWARD_POST_HOOK
from flatfsdp.flat.layout import FlatLayout, ParamSlot, ParamSpec, Role
from flatfsdp.flat.pack_candidates import PackedParams
from flatfsdp.flat.sites import Site, assign, parameter_sites, place

_DICT_OF, _PARAMETERS_OF = attrgetter("__dict__"), attrgetter("_parameters")


class Binding:
    """The slots of one layout and, for each slot, every site that holds it (tied parameters have several).

    Attributes:
        pack_owners: owners of each pack of the layout.
        is_moved: whether packs have changed the order of the parameters.
        is_registered: whether modules have real parameters now, from `register`.
    """

    def __init__(
        self,
        layout: FlatLayout,
        sites: Sequence[tuple[Site, ...]],
        pack_owners: Sequence[tuple[tuple[nn.Module, str], ...]] = (),
    ) -> None:
        self.layout = layout
        self.sites = tuple(sites)
        self.pack_owners = tuple(pack_owners)
        self.is_moved = False
        self.is_registered = False
        self.listed: Sequence[nn.Parameter] = ()
        # One tuple of modules, one of attributes, one of slots, for `_are_in_place`.
        places = [
            (site.module, site.attribute, slot) for slot, group in enumerate(self.sites) for site in group
        ]
        self._flat_sites: tuple[tuple[Any, ...], ...] = tuple(zip(*places, strict=True)) or ((), (), ())
        # For `register`: state-dict keys come in this order.
        self._order = {site.module: tuple(site.module._parameters) for group in sites for site in group}

    @staticmethod
    def of(
        module: nn.Module,
        parameters: Iterable[nn.Parameter],
        role: Role = Role.COMPUTE,
        tensor: Ranks = ALONE,
        packs: Sequence[PackedParams] = (),
        cuts: int = 1,
    ) -> Binding:
        """Packs `parameters`, in that order, and finds every site below `module` that holds one of them.

        Args:
            module: module whose parameters are packed.
            parameters: parameters to pack, in this order.
            role: storage role of all of them.
            tensor: tensor-parallel ranks that share the layers inside.
            packs: packs of these parameters; a pack whose parts are not neighbours is left out.
            cuts: number of equal parts that shards are made of.

        Raises:
            ValueError: if a parameter is not registered below `module`.
        """
        found: dict[nn.Parameter, list[Site]] = {parameter: [] for parameter in parameters}
        for site, parameter in parameter_sites(module):
            if parameter in found:
                found[parameter].append(site)
        # Before anything is taken out of the module.
        for parameter, sites in found.items():
            if not sites:
                raise ValueError(
                    f"a parameter of shape {tuple(parameter.shape)} is not registered below "
                    f"{type(module).__name__}; pass parameters of the module that is wrapped"
                )
        specs = (
            ParamSpec(sites[0].name, tuple(p.shape), role, placement_of(p, tensor), partition_of(p, tensor))
            for p, sites in found.items()
        )
        owners = {pack.name: pack.owners for pack in packs}
        wanted = [(pack.name, [found[part][0].name for part in pack.parts]) for pack in packs]
        layout = FlatLayout.pack(specs, wanted, cuts)
        sites_of = [tuple(sites) for sites in found.values()]
        return Binding(layout, sites_of, [owners[pack.name] for pack in layout.packs])

    def parameters(self) -> list[nn.Parameter]:
        """Registered parameters, one a slot; only while they are registered."""
        return [sites[0].module._parameters[sites[0].attribute] for sites in self.sites]  # type: ignore[misc]

    def replaced(self, views: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Finds slots whose registered parameter was replaced, as (view, new value).

        Works only while parameters are registered; `views` are those that they were registered over.

        Raises:
            ValueError: if a parameter has been removed or replaced by one of another shape, or a tied one by
                two different ones.
        """
        writes = []
        for slot, sites, view in zip(self.layout.slots, self.sites, views, strict=True):
            moved: dict[int, Tensor] = {}
            for parameter in (site.module._parameters.get(site.attribute) for site in sites):
                if parameter is None or tuple(parameter.shape) != slot.shape:
                    found = "removed" if parameter is None else f"given shape {tuple(parameter.shape)}"
                    raise ValueError(
                        f"parameter {slot.name} was {found} while registered; its slot has shape {slot.shape}"
                    )
                if parameter.data_ptr() != view.data_ptr():
                    moved[parameter.data_ptr()] = parameter
            if len(moved) > 1:
                names = ", ".join(site.name for site in sites)
                raise ValueError(f"{names} are tied, but got different values while they were registered")
            # Cloned, because two parameters may have been swapped.
            writes += [(view, value.detach().clone()) for value in moved.values()]
        return writes

    def list(self, listed: Sequence[nn.Parameter]) -> None:
        """Makes modules list these parameters, one a slot, instead of the tensors from `bind`.

        `module.parameters()` and `module._parameters` show the listed parameter, the attribute
        `module.weight` the bound tensor: Python looks into an object's own dict before it asks nn.Module.
        """
        self.listed = listed

    def bind(self, tensors: Sequence[Tensor]) -> None:
        """Sets `site.module.attribute` to the tensor of its slot, as a plain attribute.

        The attribute is not registered: `module.parameters()` lists what `list` was given, or nothing.
        """
        self.is_registered = False
        if self.listed:
            for sites, tensor, listed in zip(self.sites, tensors, self.listed, strict=True):
                for site in sites:
                    site.module._parameters[site.attribute] = listed
                    place(site, tensor)
            return
        for sites, tensor in zip(self.sites, tensors, strict=True):
            for site in sites:
                # What is registered would be listed, and given to an optimizer.
                site.module._parameters.pop(site.attribute, None)
                assign(site, tensor)
                if isinstance(tensor, nn.Parameter):
                    # The assignment registered it; make it a plain attribute again.
                    site.module.__dict__[site.attribute] = site.module._parameters.pop(site.attribute)

    def displaced(self, tensors: Sequence[Tensor]) -> str | None:
        """Name of a parameter that was replaced by something that was neither bound nor listed."""
        # Each forward asks, and usually nothing is.
        if self._are_in_place(tensors):
            return None
        for sites, tensor, listed in zip(self.sites, tensors, self.listed or repeat(None), strict=False):
            for site in sites:
                module, attribute = site.module, site.attribute
                if module.__dict__.get(attribute) is not tensor:
                    return site.name
                if listed is not None and module._parameters.get(attribute) is not listed:
                    return site.name
        return None

    def _are_in_place(self, tensors: Sequence[Tensor]) -> bool:
        """Whether nothing was replaced, found out without a loop in Python: each forward asks."""
        modules, attributes, slots = self._flat_sites
        shown = map(dict.get, map(_DICT_OF, modules), attributes)
        if not all(map(is_, shown, map(tensors.__getitem__, slots))):
            return False
        if not self.listed:
            return True
        registered = map(dict.get, map(_PARAMETERS_OF, modules), attributes)
        return all(map(is_, registered, map(self.listed.__getitem__, slots)))

    def register(self, parameters: Sequence[nn.Parameter]) -> None:
        """Registers real parameters at every site, in place of what `bind` put there.

        Modules list their parameters in the original order again, which is the order of state-dict keys.
        """
        self.is_registered = True
        for sites, parameter in zip(self.sites, parameters, strict=True):
            for site in sites:
                # A plain attribute would hide the registered parameter.
                site.module.__dict__.pop(site.attribute, None)
                assign(site, parameter)
        for module, names in self._order.items():
            registered = module._parameters
            for name in [name for name in names if name in registered]:
                registered[name] = registered.pop(name)


def misfit(slot: ParamSlot, value: Any, key: str) -> str | None:
    """Says why a value cannot be loaded into a slot, in PyTorch's words; None if it can.

    Args:
        slot: slot to load into.
        value: value in the state dict.
        key: its key in the state dict.
    """
    if not torch.overrides.is_tensor_like(value):
        return (
            f'While copying the parameter named "{key}", expected torch.Tensor or Tensor-like object '
            f"from checkpoint but received {type(value)}"
        )
    if tuple(value.shape) == slot.shape:
        return None
    problem = (
        f"size mismatch for {key}: copying a param with shape {value.shape} from checkpoint, "
        f"the shape in current model is {torch.Size(slot.shape)}."
    )
    if tuple(value.shape) == slot.whole_shape:
        problem += " That is a part: load whole tensors with flatfsdp.checkpoint.load_full_state_dict."
    return problem


def require_plain(name: str, parameter: nn.Parameter) -> None:
    """Checks that a parameter can be put into a flat buffer.

    Raises:
        ValueError: if it is not a dense floating-point tensor in memory of its own.
    """
    if is_lazy(parameter):
        raise ValueError(f"parameter {name} gets its shape in the first forward; run one before sharding")
    if SKIP_BACKWARD_POST_HOOK.of(parameter):
        raise ValueError(
            f"the gradient of parameter {name} is computed after the backward, by backward_dw(), and "
            "FlatFSDP reduces gradients in the backward; build its layer without delay_wgrad_compute"
        )
    kind = type(parameter.data)
    if kind.__module__.startswith("torch.distributed."):
        raise ValueError(
            f"parameter {name} is a {kind.__name__}; FlatFSDP shards plain dense tensors: wrap the module "
            "without parallelize_module or fully_shard, and give tensor-parallel layers a tp_group"
        )
    is_dense = parameter.layout is torch.strided
    if kind is not Tensor or not is_dense or not parameter.is_floating_point():
        found = f"a {kind.__name__}" if kind is not Tensor else str(parameter.dtype)
        raise ValueError(
            f"parameter {name} is {found if is_dense else f'a {parameter.layout} tensor'}; FlatFSDP shards "
            "plain dense tensors of floating-point numbers. Load a quantized model without quantization: "
            "frozen weights take two bytes each over all ranks, and flatfsdp.layers.convert computes in FP8"
        )
