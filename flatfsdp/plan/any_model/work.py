"""Seconds that a GPU needs for what a step computes, operator by operator.

In:   each operator with its arguments and results, by `observer.py`.
Out:  seconds by place, and how many operators the host has to start.

GEMMs and attention take their operations over the machine's rates, everything else the bytes that it reads
and writes over its bandwidth.  Views and empty tensors are free.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils.flop_counter import flop_registry

from flatfsdp.flat.nested import tensors_in
from flatfsdp.fp8 import DelayedScaling, Recipe
from flatfsdp.plan.any_model import attention
from flatfsdp.plan.any_model.places import StepPlace
from flatfsdp.plan.machine import Machine

_aten = torch.ops.aten


ATTENTION = (attention.FORWARD, attention.BACKWARD)
ROWS_OF_A_TABLE = (_aten.embedding, _aten.index_select, _aten.gather)
"""Read no more of their first argument than they return."""
EMPTY = (_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided)


def _flops_of_grouped(a: Tensor, b: Tensor, *_: Any, out_val: Tensor, **__: Any) -> int:
    """Rows of `a` are shared out over the matrices of `b`; of weight gradients what is added up is."""
    shared_out = a.dim() == 2 and b.dim() == 2
    return 2 * (out_val[0] if shared_out else out_val).numel() * a.shape[-1]


_FORMULAS = {_aten._grouped_mm: _flops_of_grouped}
"""Operations of what PyTorch's counter does not know."""
WRITES_ON = ("wgrad_", "wgrad_fp8_", "adamw_", "sgd_", "accumulate_", "accumulate_many_")
"""Our kernels that read what they change.  All others only write their results."""


@dataclass
class Load:
    """Work of one place in a step.

    Attributes:
        gemms, attention, memory: seconds of a GPU.
        flops: operations of GEMMs and attention.
        operators, kernels: of PyTorch and ours, that the host starts.
    """

    gemms: float = 0.0
    attention: float = 0.0
    memory: float = 0.0
    flops: float = 0.0
    operators: int = 0
    kernels: int = 0

    @property
    def seconds(self) -> float:
        """Seconds that a GPU computes."""
        return self.gemms + self.attention + self.memory


class StepWork:
    """Adds up a step.

    Attributes:
        by_place: what has come together since `begin`.
        times: how often what is added counts.
    """

    def __init__(self, machine: Machine, recipe: Recipe | None) -> None:
        self._machine = machine
        self._recipe = recipe
        self.by_place: dict[StepPlace, Load] = defaultdict(Load)
        self.times = 1

    def begin(self) -> None:
        """Forgets everything."""
        self.by_place = defaultdict(Load)

    def add(
        self, operator: OpOverload[Any, Any], args: Any, kwargs: Mapping[str, Any], out: Any, place: StepPlace
    ) -> None:
        """Books one operator."""
        packet = operator.overloadpacket
        if operator.namespace == "c10d" or packet in EMPTY or _is_view(operator):
            return
        load, times = self.by_place[place], self.times
        if operator.namespace == "flatfsdp":
            load.kernels += times
        else:
            load.operators += times
        count = _FORMULAS.get(packet) or flop_registry.get(packet)
        if count is None:
            load.memory += times * _bytes(operator, args, kwargs, out) / self._machine.memory_bandwidth
            return
        flops = times * count(*args, **kwargs, out_val=out)
        load.flops += flops
        if packet in ATTENTION:
            query = args[0] if packet is attention.FORWARD else args[1]
            load.attention += flops / self._machine.attention_rate(query.shape[-2], query.shape[-1])
            return
        load.gemms += flops / self._rate(args)
        if operator.namespace == "flatfsdp" and operator._schema.name.endswith(("wgrad_", "wgrad_fp8_")):
            load.memory += times * 2 * _nbytes(args[0]) / self._machine.memory_bandwidth

    def _rate(self, args: Any) -> float:
        dtypes = {tensor.dtype for tensor in tensors_in(args)}
        is_fp8 = any(dtype.itemsize == 1 and dtype.is_floating_point for dtype in dtypes)
        compute = torch.float32 if dtypes == {torch.float32} else torch.bfloat16
        return self._machine.gemm_flops(compute, (self._recipe or _ANY_FP8) if is_fp8 else None)


_ANY_FP8 = DelayedScaling()


def _is_view(operator: OpOverload[Any, Any]) -> bool:
    """Whether what it returns is memory of an argument, unchanged."""
    returns = [each.alias_info for each in operator._schema.returns]
    return bool(returns) and all(alias is not None and not alias.is_write for alias in returns)


def _nbytes(value: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(value))


def _bytes(operator: OpOverload[Any, Any], args: Any, kwargs: Mapping[str, Any], out: Any) -> int:
    """Bytes that a kernel for an operator reads and writes."""
    written = _nbytes(out)
    if operator.overloadpacket in ROWS_OF_A_TABLE:
        return 2 * written + _nbytes(args[1:])
    names = [argument.name for argument in operator._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    if operator.namespace != "flatfsdp":
        return written + _nbytes(list(given.values()))
    changed = {each.name for each in operator._schema.arguments if each.alias_info is not None}
    times = 2 if operator._schema.name.removeprefix("flatfsdp::") in WRITES_ON else 1
    return sum(_nbytes(value) * (times if name in changed else 1) for name, value in given.items())


def total(loads: Mapping[StepPlace, Load], phases: Collection[str], unit: str | None = None) -> Load:
    """Sum of the work of some phases, of one unit or of all units."""
    whole = Load()
    for place, load in loads.items():
        if place.phase in phases and (unit is None or place.unit == unit):
            for field in fields(Load):
                setattr(whole, field.name, getattr(whole, field.name) + getattr(load, field.name))
    return whole
