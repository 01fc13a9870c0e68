"""Hooks that the engine has on modules: a replay is right without them, and has to tell them from others."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

_MARK = "_flatfsdp_hook"


def own_hook(hook: F) -> F:
    """Marks a function, or a method, that the engine registers as a hook: alone or as a `partial` of it."""
    vars(hook)[_MARK] = True
    return hook


def is_own_hook(hook: Any) -> bool:
    """Whether the engine has registered `hook`: it checks, or casts inputs, which is recorded."""
    function = hook.func if isinstance(hook, partial) else hook
    return getattr(function, _MARK, None) is True
