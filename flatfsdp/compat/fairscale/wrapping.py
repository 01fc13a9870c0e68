"""Wrapping by annotation: `wrap` and `auto_wrap` have an effect only inside `enable_wrap`.

In:   a module, a policy with fairscale's signature, the wrapper's class and arguments from the context.
Out:  the module with the chosen parts wrapped, inner ones first.
Next: `fsdp.py`, or any other wrapper class.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from flatfsdp.compat.fairscale.fsdp import FullyShardedDataParallel

AutoWrapPolicy = Callable[..., bool]
"""Called with module, recurse, unwrapped_params and module_is_root, by keyword.

Returns whether to visit the children of `module` if `recurse`, else whether to wrap `module` itself.
"""


class _Context(NamedTuple):
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
            way_out = "auto_wrap it once, or use config_auto_wrap_policy"
            assert not isinstance(inner, context.wrapper_cls), f"{name or 'it'} is wrapped already; {way_out}"
    policy = context.policy if auto_wrap_policy is None else auto_wrap_policy
    return _wrapped_below(module, policy, kwargs, {}, is_root=True)[0]


Done = dict[nn.Module, tuple[nn.Module, int]]
"""The result of `_wrapped_below` for each module that was visited; one may be used in several places."""


def _wrapped_below(
    module: nn.Module, policy: AutoWrapPolicy, overrides: dict[str, Any], done: Done, is_root: bool = False
) -> tuple[nn.Module, int]:
    """Wraps below and at `module`.

    Args:
        module: the module.
        policy: what is asked.
        overrides: arguments of the wrapper.
        done: results so far.
        is_root: whether `auto_wrap` was called with it.

    Returns:
        `module` or its wrapper, and the number of parameters below it that are now wrapped.
    """
    if module in done:
        return done[module]
    total, wrapped = sum(parameter.numel() for parameter in module.parameters()), 0
    if policy(module=module, recurse=True, unwrapped_params=total, module_is_root=is_root):
        for child in list(module.children()):
            replacement, numel = _wrapped_below(child, policy, overrides, done)
            wrapped += numel
            if replacement is not child:
                for name in [name for name, other in module._modules.items() if other is child]:
                    setattr(module, name, replacement)
        left = total - wrapped
        if policy(module=module, recurse=False, unwrapped_params=left, module_is_root=is_root):
            done[module] = wrap(module, **overrides), total
    return done.setdefault(module, (module, wrapped))


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


def auto_wrap_bn(
    module: nn.Module,
    single_rank_pg: bool = False,
    process_group: dist.ProcessGroup | None = None,
    fsdp_config: dict[str, Any] | None = None,
    wrap_it: bool = True,
    assert_on_collision: bool = True,
) -> nn.Module:
    """Wraps every BatchNorm (synchronised ones, too) in its own unit; call it before wrapping the rest.

    Args:
        module: the module to search.
        single_rank_pg: keep their few parameters whole on every rank of process_group and average gradients,
            rather than shard them.
        process_group: rank group of the units; default: all ranks.
        fsdp_config: arguments of the units instead of the default (FP32, kept after forward); its
            flatten_parameters is ignored.
        wrap_it: False only tags the layers with `wrapper_config`, for `auto_wrap` with
            `config_auto_wrap_policy`.
        assert_on_collision: fail if a layer is already tagged.

    Returns:
        `module`, changed in place, or the unit around it if it is a BatchNorm itself.
    """
    if fsdp_config is None:
        fsdp_config = {"process_group": process_group, "reshard_after_forward": False}
    config = {**fsdp_config, "flatten_parameters": True, "shard": not single_rank_pg}
    for name, layer in module.named_modules():
        if isinstance(layer, _BatchNorm):
            assert not (assert_on_collision and hasattr(layer, "wrapper_config")), (
                f"{name or 'the module'} has a wrapper_config already; was it tagged by another policy?"
            )
            layer.wrapper_config = config  # type: ignore[assignment]
    wrapping = enable_wrap(config_auto_wrap_policy, wrapper_cls=FullyShardedDataParallel)
    with wrapping if wrap_it else nullcontext():
        return auto_wrap(module)
