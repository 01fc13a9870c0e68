"""Seconds that a GPU needs for what a step computes, operator by operator.

In:   each operator with its arguments and results, by `observer.py`.
Out:  `Load`s by place: seconds, operations, and how many operators the host has to start.

GEMMs and attention take their operations over the machine's rates, everything else the bytes that it reads
and writes over its bandwidth.  Views and empty tensors are free.  Collectives among tensor-parallel ranks are
counted as well; those for parameters and gradients are in the engine's byte ledger.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._ops import OpOverload
from torch.utils.flop_counter import flop_registry

from flatfsdp.flat.nested import tensors_in
from flatfsdp.fp8 import DelayedScaling, Recipe
from flatfsdp.plan.machine import Machine
from flatfsdp.plan.trace import attention
from flatfsdp.plan.trace.places import StepPlace

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
WRITES_ON = ("adamw_", "sgd_", "accumulate_", "accumulate_many_", "add_rows_")
"""Our kernels that read what they change.  All others only write their results."""
MEASURING = ("max_abs_", "current_scales_")
"""Our kernels that a cast launches beside its own: they cost the host no more than one of PyTorch's."""


class Load(NamedTuple):
    """Work of one place in a step.

    Attributes:
        gemms, attention, memory: seconds of a GPU.
        flops: operations of GEMMs and attention.
        operators, kernels: of PyTorch and ours, that the host starts.
        exchanges, exchanged: collectives among tensor-parallel ranks, and bytes that this rank sends in them.
    """

    gemms: float = 0.0
    attention: float = 0.0
    memory: float = 0.0
    flops: float = 0.0
    operators: float = 0
    kernels: float = 0
    exchanges: float = 0
    exchanged: float = 0

    @property
    def seconds(self) -> float:
        """Seconds that a GPU computes."""
        return self.gemms + self.attention + self.memory

    def times(self, count: float) -> Load:
        """The work of doing this so often."""
        return Load(*(count * each for each in self))


def total(loads: Iterable[Load]) -> Load:
    """The work of all of these."""
    return Load(*map(sum, zip(Load(), *loads, strict=True)))


class StepWork:
    """Adds up a step.

    Args:
        tp_group: the tensor-parallel ranks; None if there is one.
    """

    def __init__(self, machine: Machine, recipe: Recipe | None, tp_group: dist.ProcessGroup | None) -> None:
        self._machine = machine
        self._recipe = recipe
        self._tp_ranks = [0] if tp_group is None else dist.get_process_group_ranks(tp_group)
        self._by_place: dict[StepPlace, list[Load]] = defaultdict(list)

    def take(self) -> dict[StepPlace, Load]:
        """What has come together since the last call, by place."""
        taken = {place: total(loads) for place, loads in self._by_place.items()}
        self._by_place.clear()
        return taken

    def add(
        self, operator: OpOverload[Any, Any], args: Any, kwargs: Mapping[str, Any], out: Any, place: StepPlace
    ) -> None:
        """Books one operator."""
        packet = operator.overloadpacket
        if packet in EMPTY or _is_view(operator):
            return
        if operator.namespace == "c10d":
            self._by_place[place].append(self._exchange(operator, [*args, *kwargs.values()]))
            return
        ours = operator.namespace == "flatfsdp" and packet.__name__ not in MEASURING
        load = Load(operators=not ours, kernels=ours)
        count, bandwidth = _FORMULAS.get(packet) or flop_registry.get(packet), self._machine.memory_bandwidth
        if count is None:
            load = load._replace(memory=_bytes(operator, args, kwargs, out) / bandwidth)
        else:
            load = load._replace(flops=count(*args, **kwargs, out_val=out))
            if packet in ATTENTION:
                query = args[0] if packet is attention.FORWARD else args[1]
                rate = self._machine.attention_rate(query.shape[-2], query.shape[-1])
                load = load._replace(attention=load.flops / rate)
            else:
                load = load._replace(gemms=load.flops / self._rate(args))
            given = _given(operator, args, kwargs)
            if "first" in given:
                # The GEMM of a weight gradient writes FP32 at its end; all but the first one read it, too.
                load = load._replace(memory=(2 - given["first"]) * _nbytes(args[0]) / bandwidth)
        self._by_place[place].append(load)

    def _exchange(self, operator: OpOverload[Any, Any], given: list[Any]) -> Load:
        """The bandwidth-optimal traffic of a collective, if it is one of tensor-parallel ranks."""
        group = next(dist.ProcessGroup.unbox(each) for each in given if isinstance(each, torch.ScriptObject))
        size = len(self._tp_ranks)
        payload = max((_nbytes(tensor) for tensor in tensors_in(given)), default=0)
        hops = 2 if "allreduce" in operator.overloadpacket.__name__ else 1
        # Numbers are amaxes, which are compared as integers, and what ranks tell each other: a few bytes.
        # What is gathered is gathered as bytes.
        dtypes = {tensor.dtype for tensor in tensors_in(given)}
        numbers = not any(each.is_floating_point or (hops == 1 and each == torch.uint8) for each in dtypes)
        if size == 1 or numbers or dist.get_process_group_ranks(group) != self._tp_ranks:
            return Load()
        return Load(exchanges=1, exchanged=hops * payload * (size - 1) // size)

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


def _given(operator: OpOverload[Any, Any], args: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments by name."""
    names = (argument.name for argument in operator._schema.arguments)
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _bytes(operator: OpOverload[Any, Any], args: Any, kwargs: Mapping[str, Any], out: Any) -> int:
    """Bytes that a kernel for an operator reads and writes."""
    written = _nbytes(out)
    if operator.overloadpacket in ROWS_OF_A_TABLE:
        return 2 * written + _nbytes(args[1:])
    given = _given(operator, args, kwargs)
    if operator.namespace != "flatfsdp":
        return written + _nbytes(list(given.values()))
    changed = {each.name for each in operator._schema.arguments if each.alias_info is not None}
    times = 2 if operator._schema.name.removeprefix("flatfsdp::") in WRITES_ON else 1
    return sum(_nbytes(value) * (times if name in changed else 1) for name, value in given.items())
