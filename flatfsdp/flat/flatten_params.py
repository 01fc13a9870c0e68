"""`FlattenParamsWrapper`: keeps a module's parameters in a few flat ones, without sharding or process group.

In:   a module, and optionally the parameters of each flat parameter.
Out:  a module with flat parameters that computes, saves and loads like the original.
Next: any optimizer; `engine/api/wrapper.py` is the sharded counterpart on the same base class
      (`module_wrapper.py`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flatfsdp.contract.transparent import unwrapped
from flatfsdp.flat.binding import Binding, misfit
from flatfsdp.flat.layout import FlatLayout
from flatfsdp.flat.module_wrapper import ModuleWrapper
from flatfsdp.flat.sites import parameter_sites


class FlatParamMetadata(NamedTuple):
    """Contents of one flat parameter, in address order; one entry for each distinct parameter."""

    param_names: tuple[str, ...]
    """Keys in the wrapped module's state dict; the first one for a tied parameter."""
    param_shapes: tuple[tuple[int, ...], ...]
    param_numels: tuple[int, ...]
    shared_names: tuple[tuple[str, ...], ...]
    """Further keys of each tied parameter."""


class FlattenParamsWrapper(ModuleWrapper):
    """Replaces parameters of `module` by views of flat 1-D parameters, which it registers instead.

    Each group becomes one flat `nn.Parameter` in the group's dtype, of `layout.padded_numel(1)` elements;
    every original parameter starts on a multiple of 16 elements, and the gaps between them stay zero.

    Args:
        module: module to wrap; changed in place.
        param_list: parameters for one flat parameter, or a list of such lists for several; None takes all
            parameters except flat ones of inner wrappers, an empty list none.  A parameter that is tied
            inside `module` is replaced wherever it occurs.
        flat_param_names: one attribute name a group; default: `flat_param_0`, `flat_param_1`, ...

    Raises:
        TypeError: if param_list contains anything but parameters.
        ValueError: if a parameter is not below `module`, is in two groups, is a flat parameter of an inner
            wrapper, or differs from its group in dtype, device or requires_grad; if a group is empty; if
            names are too few, too many, repeated, invalid or taken.  `module` is then unchanged.
    """

    def __init__(
        self,
        module: nn.Module,
        param_list: Iterable[nn.Parameter] | Iterable[Iterable[nn.Parameter]] | None = None,
        flat_param_names: Sequence[str] | None = None,
    ) -> None:
        super().__init__(module)
        self.bindings: tuple[Binding, ...] = ()
        self._flat_names: tuple[str, ...] = ()
        self._is_flat = False
        bindings = [Binding.of(module, group) for group in _groups(module, param_list)]
        for binding in bindings:
            _check_group(binding)
        if flat_param_names is None:
            flat_param_names = [f"flat_param_{index}" for index in range(len(bindings))]
        _check_names(flat_param_names, len(bindings), self)
        self._flatten(bindings, flat_param_names)

    def _flatten(self, bindings: Sequence[Binding], names: Sequence[str]) -> None:
        self.bindings, self._flat_names, self._is_flat = tuple(bindings), tuple(names), bool(names)
        for name, binding in zip(names, bindings, strict=True):
            parameters = binding.parameters()
            flat = parameters[0].new_zeros(binding.layout.padded_numel(1))
            for view, parameter in zip(binding.layout.views(flat), parameters, strict=True):
                view.copy_(parameter.detach())
            self._register_flat(name, nn.Parameter(flat, requires_grad=parameters[0].requires_grad))
        self._bind_views()

    def _bind_views(self) -> None:
        # Differentiable in any grad mode, because the views stay in the module.
        with torch.enable_grad():
            for binding, flat in zip(self.bindings, self.flat_params, strict=True):
                binding.bind(_FlatViews.apply(flat, binding.layout))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the wrapped module with views of the flat parameters."""
        if self.is_flattened:
            self._bind_views()
        return self.module(*args, **kwargs)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> FlattenParamsWrapper:
        super()._apply(fn, recurse)
        if self.is_flattened:
            # The flat parameters may have new memory.
            self._bind_views()
        return self

    # ---- what is where ----------------------------------------------------------------------------------

    @property
    def is_flattened(self) -> bool:
        """Whether there are flat parameters now: False inside `unflatten_params`, and if none were taken."""
        return self._is_flat

    @property
    def flat_params(self) -> list[nn.Parameter]:
        """The flat parameters."""
        return [getattr(self, name) for name in self._flat_names]

    @property
    def flat_param(self) -> nn.Parameter:
        """The flat parameter, if there is exactly one.

        Raises:
            AttributeError: if there is none, or several.
        """
        if len(self._flat_names) != 1:
            raise AttributeError(f"there are {len(self._flat_names)} flat parameters; use flat_params")
        return self.flat_params[0]

    @property
    def num_params_managed(self) -> int:
        """Number of distinct parameters that were flattened; a tied one counts once."""
        return sum(len(binding.layout.slots) for binding in self.bindings)

    def metadata(self, index: int) -> FlatParamMetadata:
        """Describes flat parameter number `index`.

        Raises:
            IndexError: if there is no such flat parameter.
        """
        binding = self.bindings[index]
        slots = binding.layout.slots
        return FlatParamMetadata(
            tuple(slot.name for slot in slots),
            tuple(slot.shape for slot in slots),
            tuple(slot.numel for slot in slots),
            tuple(tuple(site.name for site in sites[1:]) for sites in binding.sites),
        )

    def get_param_views(self, flat_params: Sequence[Tensor] | None = None) -> list[Tensor]:
        """Views of all distinct parameters, in the order of `metadata`, over all groups.

        Args:
            flat_params: tensors of the lengths of the flat parameters, any dtype and device; default: the
                flat parameters.  The views are differentiable with respect to them.

        Raises:
            ValueError: if number or shapes do not fit.
        """
        flats = self._checked(flat_params)
        return [
            view
            for binding, flat in zip(self.bindings, flats, strict=True)
            for view in _FlatViews.apply(flat, binding.layout)
        ]

    def _checked(self, flat_params: Sequence[Tensor] | None) -> Sequence[Tensor]:
        if flat_params is None:
            return self.flat_params
        expected = [(binding.layout.padded_numel(1),) for binding in self.bindings]
        shapes = [tuple(flat.shape) for flat in flat_params]
        if shapes != expected:
            raise ValueError(f"flat_params have shapes {shapes}; this wrapper needs {expected}")
        return flat_params

    # ---- ordinary parameters for a while ----------------------------------------------------------------

    @contextmanager
    def unflatten_params(self, flat_params: Sequence[Tensor] | None = None) -> Iterator[None]:
        """Context in which `module` has ordinary parameters under their original names, and no flat ones.

        They alias the flat parameters, so writes to them stay.  The values of a replaced parameter are copied
        into the flat parameter at the end, unless the block raises.  Gradients are not carried over.

        Args:
            flat_params: tensors to read the parameters from, as in `get_param_views`; the flat parameters
                parameters then stay as they are.

        Raises:
            ValueError: if `flat_params` do not fit; at the end of the block, if a parameter was removed
                or replaced by one of another shape, or a tied one by two different ones.
            RuntimeError: if `flat_params` are given inside another `unflatten_params`.
        """
        flats = self._checked(flat_params)
        if not self.is_flattened:
            if flat_params:
                raise RuntimeError("flat_params cannot be given inside another unflatten_params")
            yield
            return
        registered = [
            [nn.Parameter(view, own.requires_grad) for view in binding.layout.views(flat.detach())]
            for binding, own, flat in zip(self.bindings, self.flat_params, flats, strict=True)
        ]
        for name, binding, parameters in zip(self._flat_names, self.bindings, registered, strict=True):
            # The flat parameter stays an attribute, but is not registered.
            self.__dict__[name] = self._parameters.pop(name)
            binding.register(parameters)
        self._is_flat = False
        try:
            yield
            if flat_params is None:
                self._write_back()
        finally:
            for name in self._flat_names:
                self._register_flat(name, self.__dict__.pop(name))
            self._is_flat = True
            self._bind_views()

    def _write_back(self) -> None:
        """Copies registered parameters that do not alias their slots, after checking all of them."""
        pairs = zip(self.bindings, self.flat_params, strict=True)
        writes = [w for binding, flat in pairs for w in binding.replaced(binding.layout.views(flat.detach()))]
        for view, value in writes:
            view.copy_(value)

    # ---- state dicts ------------------------------------------------------------------------------------

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """State dict of `module` as before wrapping: same keys, order and shapes."""
        with self.unflatten_params():
            return super().state_dict(*args, **kwargs)

    def flat_state_dict(self, *, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """State dict with flat parameters under their own names, the rest as in `state_dict`; loadable."""
        saved = self.module.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        self._save_to_state_dict(saved, prefix, keep_vars)
        return saved

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        """Loads the flat parameters, in their own form or in that of `module`, and leaves it the rest.

        Values are always copied, even with `assign=True`.
        """
        _, strict, missing_keys, _, error_msgs = others
        for name, binding in zip(self._flat_names, self.bindings, strict=True):
            flat = state_dict.pop(prefix + name, None)
            if flat is None:
                continue
            numel = binding.layout.padded_numel(1)
            if tuple(flat.shape) != (numel,):
                error_msgs.append(
                    f"size mismatch for {prefix + name}: copying a param with shape {flat.shape} from "
                    f"checkpoint, the shape in current model is {torch.Size([numel])}."
                )
                continue
            for sites, view in zip(binding.sites, binding.layout.views(flat), strict=True):
                state_dict.update((prefix + site.name, view) for site in sites)
        for own, binding in zip(self.flat_params, self.bindings if self.is_flattened else (), strict=False):
            for slot, sites in zip(binding.layout.slots, binding.sites, strict=True):
                for key in (prefix + site.name for site in sites):
                    if key not in state_dict:
                        missing_keys += [key] if strict else []
                    elif (problem := misfit(slot, state_dict[key], key)) is not None:
                        error_msgs.append(problem)
                    else:
                        with torch.no_grad():
                            own[slot.offset : slot.end].view(slot.shape).copy_(state_dict[key])
                    state_dict.pop(key, None)
        super()._load_from_state_dict(state_dict, prefix, *others)

    # ---- copies -----------------------------------------------------------------------------------------

    def _portable_state(self, memo: dict[int, Any]) -> dict[str, Any]:
        """Own attributes with an ordinary module inside, and the parameters to flatten again.

        It is a deep copy, because this wrapper is flat again before anything reads it.
        """
        groups = {
            name: [slot.name for slot in binding.layout.slots]
            for name, binding in zip(self._flat_names, self.bindings, strict=True)
        }
        with self.unflatten_params():
            kept = {k: v for k, v in vars(self).items() if k not in ("bindings", *self._flat_names)}
            return {**copy.deepcopy(kept, memo), "_groups": groups}

    def __getstate__(self) -> dict[str, Any]:
        # References to this wrapper must point to what is pickled, not to a copy.
        return self._portable_state({id(self): self})

    def __setstate__(self, state: dict[str, Any]) -> None:
        groups = state["_groups"]
        super().__setstate__({k: v for k, v in state.items() if k != "_groups"})
        by_name = {site.name: parameter for site, parameter in parameter_sites(self.module)}
        bindings = [Binding.of(self.module, [by_name[name] for name in names]) for names in groups.values()]
        self._flatten(bindings, list(groups))

    def __deepcopy__(self, memo: dict[int, Any]) -> FlattenParamsWrapper:
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__setstate__(self._portable_state(memo))
        return copied


class _FlatViews(torch.autograd.Function):
    """Views of a flat tensor, one per slot; backward is one concat.

    `layout.views` alone would not do: once an optimizer has written to the flat parameter, autograd refuses
    any use of a split's outputs, even printing.  Detached tensors still share memory and version counter, so
    a write between forward and backward is noticed.
    """

    @staticmethod
    def forward(flat: Tensor, layout: FlatLayout) -> tuple[Tensor, ...]:
        """Detached views of `flat`, one a slot."""
        return tuple(view.detach() for view in layout.views(flat.detach()))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, FlatLayout], output: tuple[Tensor, ...]) -> None:
        flat, ctx.layout = inputs
        ctx.numel = flat.numel()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        parts: list[Tensor] = []
        cursor = 0
        for slot, grad in zip(ctx.layout.slots, grads, strict=True):
            if grad.layout is not torch.strided:
                way_out = "build the layer without sparse gradients (nn.Embedding(sparse=False))"
                raise TypeError(f"parameter {slot.name} got a {grad.layout} gradient; {way_out}")
            parts += [grad.new_zeros(slot.offset - cursor), grad.reshape(-1)]
            cursor = slot.end
        return torch.cat([*parts, grads[0].new_zeros(ctx.numel - cursor)]), None


def _groups(
    module: nn.Module, param_list: Iterable[nn.Parameter] | Iterable[Iterable[nn.Parameter]] | None
) -> list[list[nn.Parameter]]:
    """The parameters of each group."""
    if param_list is None:
        found = [p for site, p in parameter_sites(module) if not isinstance(site.module, ModuleWrapper)]
        return [found] if found else []
    entries: list[Any] = list(param_list)
    is_one_group = any(isinstance(entry, Tensor) for entry in entries)
    lists = [entries] if is_one_group else [list(entry) for entry in entries]
    names = {parameter: site.name for site, parameter in parameter_sites(module)}
    group_of: dict[nn.Parameter, int] = {}
    for index, group in enumerate(lists):
        if not group:
            raise ValueError(f"group {index} of param_list is empty; leave it out")
        for parameter in group:
            if not isinstance(parameter, nn.Parameter):
                raise TypeError(f"group {index} of param_list contains a {type(parameter)}, no parameter")
            if (first := group_of.setdefault(parameter, index)) != index:
                raise ValueError(
                    f"parameter {names.get(parameter)} is in groups {first} and {index}; put it in one group"
                )
    return lists


def _check_group(binding: Binding) -> None:
    parameters = binding.parameters()
    first = parameters[0]
    for slot, sites, parameter in zip(binding.layout.slots, binding.sites, parameters, strict=True):
        if any(isinstance(site.module, ModuleWrapper) for site in sites):
            raise ValueError(f"{slot.name} is flat already, in an inner wrapper; leave it out of param_list")
        for trait in ("dtype", "device", "requires_grad"):
            ours, theirs = getattr(parameter, trait), getattr(first, trait)
            if ours != theirs:
                other = f"{binding.layout.slots[0].name} in the same group has {theirs}"
                raise ValueError(f"parameter {slot.name} has {trait} {ours}, but {other}; make two groups")


def _check_names(names: Sequence[str], num_groups: int, wrapper: FlattenParamsWrapper) -> None:
    if len(names) != num_groups:
        raise ValueError(f"{len(names)} flat_param_names for {num_groups} groups of parameters")
    # The module's own names count as taken, because both would claim one key in flat_state_dict.
    taken = {*dir(wrapper), *dir(unwrapped(wrapper))}
    for name in names:
        if not isinstance(name, str) or not name.isidentifier():
            raise ValueError(f"flat_param_names contains {name!r}, which is not an attribute name")
        if name in taken:
            raise ValueError(f"flat_param_names: {name!r} is taken; choose another name")
        taken.add(name)
