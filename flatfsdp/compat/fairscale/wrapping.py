"""Wrapping by annotation: `wrap` and `auto_wrap` have an effect only inside `enable_wrap`.

In:   a module, a policy with fairscale's signature, the wrapper's class and arguments from the context.
Out:  the module with the chosen parts wrapped, inner ones first.
Next: `engine/api/wrapper.py`, or any other wrapper class.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from torch import nn

AutoWrapPolicy = Callable[..., bool]
"""Called with module, recurse, unwrapped_params and module_is_root, by keyword.

Returns whether to visit the children of `module` if `recurse`, else whether to wrap `module` itself.
"""


@dataclass(frozen=True)
class _Context:
    """The arguments of `enable_wrap`."""

    wrapper_cls: Callable[..., nn.Module]
    policy: AutoWrapPolicy
    move_module_cuda_half: bool
    options: dict[str, Any]


_context: ContextVar[_Context | None] = ContextVar("enable_wrap", default=None)


@contextmanager
def enable_wrap(
    auto_wrap_policy: AutoWrapPolicy | None = None,
    *,
    wrapper_cls: Callable[..., nn.Module] | None = None,
    move_module_cuda_half: bool = False,
    **wrapper_kwargs: Any,
) -> Iterator[None]:
    """Context in which `wrap` and `auto_wrap` wrap with `wrapper_cls(module, **wrapper_kwargs)`.

    Args:
        auto_wrap_policy: policy of `auto_wrap`; default: `default_auto_wrap_policy`.
        wrapper_cls: class of the wrapper; required.
        move_module_cuda_half: convert each module with `.cuda().half()` before it is wrapped.
        wrapper_kwargs: arguments of the wrapper.  A module's attribute `wrapper_config`, a dict, overrides
            them; arguments of `wrap` and `auto_wrap` override both.

    Raises:
        AssertionError: without wrapper_cls.
        NotImplementedError: inside another `enable_wrap`.
    """
    assert wrapper_cls is not None, "enable_wrap needs wrapper_cls=, the class to wrap with"
    if _context.get() is not None:
        raise NotImplementedError("enable_wrap cannot be nested; leave the outer one first")
    policy = default_auto_wrap_policy if auto_wrap_policy is None else auto_wrap_policy
    token = _context.set(_Context(wrapper_cls, policy, move_module_cuda_half, wrapper_kwargs))
    try:
        yield
    finally:
        _context.reset(token)


def wrap(module: nn.Module, **wrap_overrides: Any) -> nn.Module:
    """Wraps `module` inside `enable_wrap`; returns it unchanged elsewhere."""
    context = _context.get()
    if context is None:
        return module
    own = getattr(module, "wrapper_config", {})
    assert isinstance(own, dict), f"wrapper_config of {type(module).__name__} is {own!r}; make it a dict"
    if context.move_module_cuda_half:
        module = module.cuda().half()
    return context.wrapper_cls(module, **{**context.options, **own, **wrap_overrides})


def auto_wrap(module: nn.Module, auto_wrap_policy: AutoWrapPolicy | None = None, **kwargs: Any) -> nn.Module:
    """Wraps the parts of `module` that the policy picks, and `module` itself if it is picked; in place.

    Outside `enable_wrap` it does nothing.

    Args:
        module: the module to search.
        auto_wrap_policy: default: the context's.
        kwargs: overrides arguments of the wrapper.

    Returns:
        The wrapped module, or `module` itself if it was not picked.

    Raises:
        AssertionError: if part of `module` is already wrapped, so that its parameters cannot be counted.
    """
    context = _context.get()
    if context is None:
        return module
    if isinstance(context.wrapper_cls, type):
        for name, inner in module.named_modules():
            assert not isinstance(inner, context.wrapper_cls), (
                f"{name or 'the module'} is wrapped already; auto_wrap it once, or tag modules with "
                "wrapper_config and use config_auto_wrap_policy"
            )
    return _Walk(context.policy if auto_wrap_policy is None else auto_wrap_policy, kwargs).visit(module)


class _Walk:
    """One `auto_wrap`; remembers visited modules, which may be used in several places."""

    def __init__(self, policy: AutoWrapPolicy, overrides: dict[str, Any]) -> None:
        self._policy = policy
        self._overrides = overrides
        self._done: dict[nn.Module, tuple[nn.Module, int]] = {}

    def visit(self, root: nn.Module) -> nn.Module:
        """Wraps below and at `root`; returns it or its wrapper."""
        return self._visit(root, is_root=True)[0]

    def _visit(self, module: nn.Module, *, is_root: bool) -> tuple[nn.Module, int]:
        """Returns `module` or its wrapper, and the number of parameters below it that are now wrapped."""
        if module not in self._done:
            self._done[module] = self._wrap_below(module, is_root)
        return self._done[module]

    def _wrap_below(self, module: nn.Module, is_root: bool) -> tuple[nn.Module, int]:
        total = sum(parameter.numel() for parameter in module.parameters())

        def policy(recurse: bool, unwrapped: int) -> bool:
            return self._policy(
                module=module, recurse=recurse, unwrapped_params=unwrapped, module_is_root=is_root
            )

        if not policy(True, total):
            return module, 0
        wrapped = 0
        for child in list(module.children()):
            replacement, numel = self._visit(child, is_root=False)
            wrapped += numel
            if replacement is not child:
                for name in [name for name, other in module._modules.items() if other is child]:
                    setattr(module, name, replacement)
        if policy(False, total - wrapped):
            return wrap(module, **self._overrides), total
        return module, wrapped


def default_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    unwrapped_params: int,
    module_is_root: bool,
    min_num_params: int = int(1e8),
    force_leaf_modules: set[type[nn.Module]] | None = None,
    exclude_wrap_modules: set[type[nn.Module]] | None = None,
    skip_params_check_for_root: bool = False,
) -> bool:
    """Wraps by size; use `functools.partial` to change the limits.

    Args:
        module: the candidate.
        recurse: whether the question is about its children.
        unwrapped_params: number of its parameters that no inner wrapper has taken.
        module_is_root: whether it is the module that `auto_wrap` was called with.
        min_num_params: smallest number of unwrapped parameters at which a module is wrapped.
        force_leaf_modules: classes whose children are not visited; default: FORCE_LEAF_MODULES.
        exclude_wrap_modules: classes that are not wrapped themselves; default: EXCLUDE_WRAP_MODULES.
        skip_params_check_for_root: wrap the root whatever its size.
    """
    leaves = FORCE_LEAF_MODULES if force_leaf_modules is None else force_leaf_modules
    excluded = EXCLUDE_WRAP_MODULES if exclude_wrap_modules is None else exclude_wrap_modules
    is_large = unwrapped_params >= min_num_params
    if recurse:
        return is_large and not isinstance(module, tuple(leaves))
    chosen = is_large or (module_is_root and skip_params_check_for_root)
    return chosen and not isinstance(module, tuple(excluded))


FORCE_LEAF_MODULES: frozenset[type[nn.Module]] = frozenset({nn.MultiheadAttention})
"""Modules that use their children's parameters without calling the children."""
EXCLUDE_WRAP_MODULES: frozenset[type[nn.Module]] = frozenset({nn.ModuleList, nn.ModuleDict})
"""Modules whose forward is never called."""

# Also attributes of the function, where programs look for them.
default_auto_wrap_policy.FORCE_LEAF_MODULES = FORCE_LEAF_MODULES  # type: ignore[attr-defined]
default_auto_wrap_policy.EXCLUDE_WRAP_MODULES = EXCLUDE_WRAP_MODULES  # type: ignore[attr-defined]


def config_auto_wrap_policy(
    module: nn.Module, recurse: bool, unwrapped_params: int, module_is_root: bool
) -> bool:
    """Wraps the modules that carry an attribute `wrapper_config`, a dict of arguments for the wrapper."""
    return recurse or hasattr(module, "wrapper_config")
