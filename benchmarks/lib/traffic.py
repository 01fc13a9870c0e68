"""Bytes that a rank sends, by kind of collective, counted below autograd whoever calls it.

In:   any code that communicates: through torch.distributed, as FlatFSDP does, through DTensor's functional
    collectives,
      or inside the GEMMs of torch.ops.symm_mem.
Out:  calls and bytes of each kind.
Next: `tensor_parallel.py` counts one step of every layer.

Compiled code is not visible; count before compiling.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE = "all-gather", "reduce-scatter", "all-reduce"


class Rule(NamedTuple):
    """How to read one operator.

    Attributes:
        payload: computes the bytes of the whole tensor from arguments, result and number of ranks.
    """

    kind: str
    payload: Callable[[Sequence[Any], Any, int], int]


def _argument(index: int) -> Callable[[Sequence[Any], Any, int], int]:
    return lambda args, result, ranks: _nbytes(args[index])


def _shares_of_argument(args: Sequence[Any], result: Any, ranks: int) -> int:
    return ranks * _nbytes(args[0])


def _shares_of_result(args: Sequence[Any], result: Any, ranks: int) -> int:
    return ranks * _nbytes(result)


def _nbytes(found: Any) -> int:
    if isinstance(found, Tensor):
        return found.numel() * found.element_size()
    return sum(map(_nbytes, found)) if isinstance(found, list | tuple) else 0


RULES = {
    "c10d::_allgather_base_": Rule(ALL_GATHER, _argument(0)),
    "c10d::_reduce_scatter_base_": Rule(REDUCE_SCATTER, _argument(1)),
    "c10d::allreduce_": Rule(ALL_REDUCE, _argument(0)),
    "_c10d_functional::all_gather_into_tensor": Rule(ALL_GATHER, _shares_of_argument),
    "_c10d_functional::reduce_scatter_tensor": Rule(REDUCE_SCATTER, _argument(0)),
    "_c10d_functional::all_reduce": Rule(ALL_REDUCE, _argument(0)),
    "_c10d_functional::all_reduce_": Rule(ALL_REDUCE, _argument(0)),
    "symm_mem::fused_all_gather_matmul": Rule(ALL_GATHER, _shares_of_argument),
    "symm_mem::fused_all_gather_scaled_matmul": Rule(ALL_GATHER, _shares_of_argument),
    "symm_mem::fused_matmul_reduce_scatter": Rule(REDUCE_SCATTER, _shares_of_result),
    "symm_mem::fused_scaled_matmul_reduce_scatter": Rule(REDUCE_SCATTER, _shares_of_result),
}
"""Rules by operator name; that of a fused GEMM covers all its chunks."""

OTHERS = frozenset(
    {"_c10d_functional::wait_tensor", "_c10d_functional::_wrap_tensor_autograd", "c10d::barrier"}
)
"""Operators of the same namespaces that send nothing."""


class Traffic(TorchDispatchMode):
    """Counts inside the context; all collectives are those of one group.

    Attributes:
        calls: by kind.
        sent: bytes that this rank sends, by kind, in a bandwidth-optimal algorithm: (N - 1) / N of the whole
            tensor, and twice that for an all-reduce.

    Raises:
        NotImplementedError: when an unknown collective is called.
    """

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()
        self._ranks = ranks

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not all(kind in (Tensor, nn.Parameter, FakeTensor) for kind in types):
            # A tensor subclass (DTensor) takes itself apart first; its plain tensors come back here.
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        rule = RULES.get(name)
        if rule is not None and not _are_numbers(args):
            payload = rule.payload(args, result, self._ranks)
            hops = 2 if rule.kind == ALL_REDUCE else 1
            self.calls[rule.kind] += 1
            self.sent[rule.kind] += hops * payload * (self._ranks - 1) // self._ranks
        elif (
            rule is None and func.namespace in ("c10d", "_c10d_functional", "symm_mem") and name not in OTHERS
        ):
            raise NotImplementedError(f"{name} is not in RULES, so nobody counts what it sends")
        return result


def _are_numbers(args: Sequence[Any]) -> bool:
    """Whether ranks only announce what they will send, as with gloo, and at the beginning of a step."""
    tensors = [arg for arg in tree_leaves(args) if isinstance(arg, Tensor)]
    return bool(tensors) and all(tensor.dtype == torch.int64 for tensor in tensors)
