"""Modules with extra state: plain, and as Transformer Engine's have it, which is not installed on CPUs.

`transformer_engine()` puts a package of that name in its place: recipes, and one layer that compares dtypes,
and whose `get_extra_state` and `set_extra_state` pickle and refuse, as those of version 2.20 do.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

RECIPES = "transformer_engine.common.recipe"


class Largest(NamedTuple):
    max_fwd: float
    max_bwd: float


class Format(Enum):
    E4M3 = Largest(448, 448)
    HYBRID = Largest(448, 57344)


@dataclass
class DelayedScaling:
    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str | Callable[[Tensor], Tensor] = "max"


class ScaledLinear(nn.Linear):
    """Scales its output by a state that each forward changes, which only `get_extra_state` tells of."""

    def __init__(self, size: int, recipe: DelayedScaling | None = None) -> None:
        super().__init__(size, size)
        self.fp8_meta: dict[str, Any] = {
            "recipe": recipe or DelayedScaling(amax_history_len=3),
            "num_gemms": 1,
        }
        self.fp8_meta["fp8_max_fwd"] = 448.0
        self.scale, self.history = torch.ones(1), torch.zeros(3, 1)
        self.ran = False

    def fast_setattr(self, name: str, value: Any) -> None:
        self.__dict__[name] = value

    def set_activation_dtype(self, inp: Tensor) -> None:
        for name, parameter in self.named_parameters():
            if parameter.dtype != inp.dtype:
                raise TypeError(f"Found input dtype: {inp.dtype} and {name!r} dtype: {parameter.dtype}")
        self.fast_setattr("activation_dtype", inp.dtype)

    def forward(self, x: Tensor) -> Tensor:
        self.set_activation_dtype(x)
        self.ran = True
        with torch.no_grad():
            self.history = self.history.roll(-1, 0)
            self.history[-1] = self.weight.abs().max()
            self.scale = 1.0 + self.history.max(0).values
        out: Tensor = super().forward(x) * self.scale.to(x.dtype)
        return out

    def get_extra_state(self) -> Tensor:
        if not self.ran:
            return torch.empty(0, dtype=torch.uint8)
        state = {
            "recipe": self.fp8_meta["recipe"],
            "scale_fwd": self.scale.clone(),
            "amax_history_fwd": self.history.clone(),
            "extra_fp8_variables": {k: v for k, v in self.fp8_meta.items() if k != "recipe"},
        }
        return torch.frombuffer(bytearray(pickle.dumps(state)), dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        if state.numel() == 0:
            return
        if os.getenv("NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE", "0") != "1":
            raise RuntimeError("Refusing to load pickled Transformer Engine extra state")
        found = pickle.loads(state.numpy().tobytes())
        self.fp8_meta = {**found["extra_fp8_variables"], "recipe": found["recipe"]}
        self.scale, self.history, self.ran = found["scale_fwd"], found["amax_history_fwd"], True


@contextmanager
def transformer_engine() -> Iterator[None]:
    """Inside, recipes and the layer are those of a package that calls itself transformer_engine."""
    recipe = ModuleType(RECIPES)
    for each in (Largest, Format, DelayedScaling):
        setattr(recipe, each.__name__, each)
    packages = {name: ModuleType(name) for name in ("transformer_engine", "transformer_engine.common")}
    moved = [(each, RECIPES) for each in (Largest, Format, DelayedScaling)]
    moved.append((ScaledLinear, "transformer_engine.pytorch.module.linear"))
    with pytest.MonkeyPatch.context() as patch:
        # One by one: `mock.patch.dict` would also forget each module that is first imported inside.
        for name, package in {**packages, RECIPES: recipe}.items():
            patch.setitem(sys.modules, name, package)
        for each, name in moved:
            patch.setattr(each, "__module__", name)
        yield


class Counting(nn.Module):
    """Counts its forwards, and notes what it likes in its extra state."""

    def __init__(self, note: Any = None) -> None:
        super().__init__()
        self.forwards, self.note = 0, note

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        return x

    def get_extra_state(self) -> Any:
        return {"forwards": self.forwards, "note": self.note}

    def set_extra_state(self, state: Any) -> None:
        self.forwards, self.note = state["forwards"], state["note"]
