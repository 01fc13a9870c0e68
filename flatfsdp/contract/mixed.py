"""Changes the class of a live module to one of the same name, with a mixin in front of its own class.

    class LlamaMLP(FusedMLP, LlamaMLP)      for a module whose class was LlamaMLP before `mix`

`isinstance`, the class's name and everything that the mixin does not define stay as they were.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn

About = Mapping[str, Any]


class Mixed:
    """Base of mixins that are put in front of a user's class.

    Attributes:
        plain_class: class that the module had before.
    """

    plain_class: ClassVar[type[nn.Module]]

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Makes a plain module, as in `type(model).from_pretrained(...)`, or a slice of a ModuleList."""
        plain = innermost(cls)
        made = plain.__new__(plain, *args, **kwargs)
        made.__init__(*args, **kwargs)
        return made

    @classmethod
    def about(cls, plain: type[nn.Module]) -> About:
        """Attributes of the new class, by name, that depend on the class before it."""
        return {}


def innermost(kind: type) -> Any:
    """Finds the user's own class, behind all mixins."""
    while "plain_class" in vars(kind):
        kind = vars(kind)["plain_class"]
    return kind


def mix(module: nn.Module, mixin: type[Mixed]) -> None:
    """Gives `module` a class of the same name, with `mixin` in front of its own.

    Raises:
        TypeError: if no class can be derived from its class.
    """
    module.__class__ = mixed_class(type(module), mixin)  # type: ignore[arg-type]


def unmix(module: nn.Module) -> None:
    """Restores the class that a module had before it was last mixed."""
    module.__class__ = getattr(type(module), "plain_class")  # noqa: B009 - its class is a mixed one


def made_again(module: Any, state: dict[str, Any] | None = None) -> Any:
    """Result for `__reduce_ex__` of a mixin, so that copies and pickles of a module are mixed, too.

    A mixed class cannot be pickled by name.

    Args:
        module: module to be copied or pickled.
        state: state of the copy; default: everything that the module has.
    """
    mixin, plain = type(module).__bases__
    return _new, (plain, mixin), module.__getstate__() if state is None else state


def _new(plain: type[nn.Module], mixin: type[Mixed]) -> Any:
    return object.__new__(mixed_class(plain, mixin))  # type: ignore[arg-type]


@functools.cache
def mixed_class(plain: type[nn.Module], mixin: type[Mixed]) -> type[nn.Module]:
    """Makes the class that `mix` gives to a module of class `plain`.

    Raises:
        TypeError: if no class can be derived from `plain` without arguments.
    """
    about = {
        "__module__": plain.__module__,
        "__qualname__": plain.__qualname__,
        "__doc__": plain.__doc__,
        "plain_class": plain,
        **mixin.about(plain),
    }
    return types.new_class(plain.__name__, (mixin, plain), exec_body=lambda body: body.update(about))
