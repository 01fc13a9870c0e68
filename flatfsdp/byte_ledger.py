"""Profiler labels and the byte ledger, which show what the engine does.

The ledger is the engine's own account; `benchmarks/lib/copy_counter.py` measures the same thing from outside.
"""

from __future__ import annotations

from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch

from flatfsdp.torch_private import is_profiling

Traffic = Literal[
    "cast",
    "measure",
    "transpose",
    "concat",
    "accumulate",
    "offload",
    "gather",
    "amax",
    "reduce",
    "all_reduce",
    "tp_all_reduce",
]


class ByteLedger:
    """Counts the bytes that this rank moves for its parameters, since `reset`; one for each root module.

    Local traffic counts bytes read plus bytes written:
        cast: master shard to compute shard, and gradients to and from another dtype of reduction.
        measure: amaxes of FP8 weights, read from the master shard; none if the optimizer takes them.
        transpose: transposes of FP8 weights for the backward.
        concat: autograd's concatenation of gradients (`optimize_backward_concat=False`).
        accumulate: gradients into `main_grad` (first a copy, then additions), and reduced shards into a sum
            or an existing gradient.
    Traffic between host and device (`cpu_offload`) counts once:
        offload: master shards one way, reduced gradients the other.
    Wire traffic counts the bytes this rank receives (gather) or sends (reduce):
        gather: all-gather of parameters, (N - 1) / N of the full size.
        amax: all-reduce of the FP8 weights' amaxes, one FP32 number a weight.
        reduce: reduce-scatter of gradients, (N - 1) / N of the full size.
        all_reduce: all-reduce of gradients across R replicas, 2 (R - 1) / R of what a rank holds.
        tp_all_reduce: all-reduce, across T tensor-parallel ranks, of gradients that are parts of a sum,
            2 (T - 1) / T of what a rank holds.

    Attributes:
        parameters: number of parameters of the model, all data-parallel ranks together.
        bytes: total by kind of traffic.
        calls: number of operations by kind of traffic.
    """

    def __init__(self) -> None:
        self.parameters = 0
        self.bytes: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()

    def add(self, kind: Traffic, nbytes: float) -> None:
        """Counts bytes of one kind, and one call."""
        self.bytes[kind] += nbytes  # type: ignore[assignment]
        self.calls[kind] += 1

    def bytes_per_parameter(self) -> dict[str, float]:
        """Bytes by kind of traffic, divided by the number of parameters."""
        return {kind: nbytes / max(self.parameters, 1) for kind, nbytes in self.bytes.items()}

    def reset(self) -> None:
        """Resets all counters."""
        self.bytes.clear()
        self.calls.clear()


def span(event: str, unit: str, microbatch: int, nbytes: int) -> AbstractContextManager[object]:
    """Profiler range such as `flatfsdp.all_gather blocks.3 mb=1 bytes=8192`; free without a profiler."""
    if not is_profiling():
        return nullcontext()
    return torch.profiler.record_function(f"flatfsdp.{event} {unit} mb={microbatch} bytes={nbytes}")
