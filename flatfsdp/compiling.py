"""What `torch.compile` sees of the engine: nothing.

In:   a model that was wrapped and then compiled as a whole, or whose modules were compiled one by one.
Out:  one graph, or several, for the modules inside each unit; the engine runs between them as it is written.

Traced, its collectives would be replaced by functional ones, which copy, and every step would be recompiled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from torch._compile import _disable_dynamo

P = ParamSpec("P")
R = TypeVar("R")


def never_traced(function: Callable[P, R]) -> Callable[P, R]:
    """Neither `function` nor what it calls is compiled.

    As `torch.compiler.disable`, which would import the compiler along with this package, rather than in the
    first forward; it takes a second.
    """
    return _disable_dynamo(function)


def traced_inside(function: Callable[P, R]) -> Callable[P, R]:
    """No caller's graph has `function` in it; what it calls is compiled, each by itself."""
    return _disable_dynamo(function, recursive=False)
