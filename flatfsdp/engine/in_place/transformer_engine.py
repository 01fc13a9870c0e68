"""Transformer Engine's modules in a model that is sharded in place.

Before they compute, they compare the dtype of their input with those of the parameters that they list.  In
place these are this rank's parts, in master precision; what they compute with is in the compute dtype.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

LIBRARY = "transformer_engine"


class DtypeOfInput:
    """In the place of a module's `set_activation_dtype`: compares with the tensors that it computes with.

    A copy of the module is another module's: it has the method of its class again.
    """

    def __init__(self, module: Any) -> None:
        self._module = module

    def __call__(self, inp: Tensor) -> None:
        """Notes the dtype of the input.

        Raises:
            TypeError: if the module computes with parameters of another dtype.
        """
        module = self._module
        if torch.is_autocast_enabled():
            type(module).set_activation_dtype(module, inp)
            return
        for name, listed in module._parameters.items():
            tensor = vars(module).get(name, listed)
            if tensor is not None and tensor.dtype != inp.dtype:
                raise TypeError(
                    f"{type(module).__name__} is given {inp.dtype}, and computes with {name} in "
                    f"{tensor.dtype}; pass Precision(compute={inp.dtype}), or cast the input"
                )
        module.fast_setattr("activation_dtype", inp.dtype)

    def __deepcopy__(self, memo: dict[int, Any]) -> DtypeOfInput:
        return DtypeOfInput(copy.deepcopy(self._module, memo))


def let_compute(module: nn.Module) -> None:
    """Lets a module of Transformer Engine compute in place; leaves all others alone."""
    is_theirs = any(base.__module__.split(".")[0] == LIBRARY for base in type(module).__mro__)
    if is_theirs and hasattr(module, "set_activation_dtype"):
        vars(module)["set_activation_dtype"] = DtypeOfInput(module)
