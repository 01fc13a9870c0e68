"""User's own functions that commands call: finding them by name, and preparing the models they build."""

from __future__ import annotations

import importlib
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from flatfsdp.kernels.gemm.gemm import ALIGNMENT
from flatfsdp.layers import convert
from flatfsdp.training.choices import PrecisionName


def function_named(name: str) -> Callable[..., Any]:
    """Imports the function named "package.module:function" or "path/to/file.py:function".

    Raises:
        ValueError: if it does not exist.
    """
    module, _, attribute = name.rpartition(":")
    if not module:
        raise ValueError(f"{name!r} names no function; write package.module:function, or file.py:function")
    if module.endswith(".py"):
        if not Path(module).is_file():
            raise ValueError(f"{name!r}: there is no file {module}")
        found = runpy.run_path(module).get(attribute)
    else:
        # As `python -m` does.
        sys.path.insert(0, "")
        try:
            found = getattr(importlib.import_module(module), attribute, None)
        except ModuleNotFoundError as error:
            raise ValueError(f"{name!r}: {error}") from None
        finally:
            sys.path.remove("")
    if not callable(found):
        raise ValueError(f"{name!r}: {module} has no function {attribute!r}")
    return found


def with_own_layers(build: Callable[[], nn.Module], precision: PrecisionName) -> nn.Module:
    """Builds a model, and converts it to our layers if the precision needs them."""
    model = build()
    if not precision.has_own_layers:
        return model
    return convert(model, _is_aligned, fp8=precision.recipe is not None)


def _is_aligned(layer: nn.Module, name: str) -> bool:
    """Whether FP8 GEMMs support the layer's sizes; includes small layers, as speed does not matter here."""
    return all(size % ALIGNMENT == 0 for size in layer.get_parameter("weight").shape)
