"""`Machine`: the measured or assumed rates and sizes of a plan's hardware.

In:   nothing, or a JSON file with some of the numbers.
Out:  a `Machine`.
Next: `trace/work.py` and `links.py` divide by these rates.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch

from flatfsdp.comm.paths import local_path
from flatfsdp.fp8 import BlockScaling, Recipe

DIVISORS = (
    *("fp8_flops", "fp8_block_flops", "bf16_flops", "fp32_flops", "attention_flops", "narrow_attention"),
    *("memory_bandwidth", "gpus_per_host", "link_bandwidth", "network_bandwidth"),
)
"""Numbers of a machine that must not be 0."""


@dataclass(frozen=True)
class Machine:
    """Rates and sizes of one kind of machine; by default hosts of eight H200s.

    Rates are what long runs of our kernels reach, not data-sheet values.  The files are in
    benchmarks/results; `tests/unit/plan/test_measured.py` recomputes the numbers from them.

    Attributes:
        name: name of the machine.
        gpu_memory: bytes; H200: 141 GB.
        workspaces: bytes that PyTorch's allocator hands out to cuBLAS, for forwards and backwards.
        reserved_memory: bytes that CUDA, cuBLAS and NCCL take for themselves.  Assumed.
        fragmentation: memory lost to gaps in PyTorch's allocator, as a share of what is allocated.  Assumed.
        fp8_flops: rate of GEMMs with one scale per tensor, without the bytes of FP32 gradients: layer.json,
            "gemms".
        fp8_block_flops: rate of GEMMs with one scale per block; benchmarks/LOG.md.
        bf16_flops: rate of bf16 GEMMs: layer.json, the bf16 layer's time besides attention and bytes.
        fp32_flops: data sheet, 67e12 without tensor cores, times 0.75.  Not measured.
        attention_flops: rate of causal attention, forward and backward, heads of 128, long sequences.
        attention_ramp: sequence length at which attention reaches half of that; both from 2048 tokens in
            layer.json and 8192 in tensor-parallel-8b-2.json.
        narrow_attention: share of that rate with heads of 64: the mean of pretrain-1b-dp-2.json and
            -tp-2.json.
        memory_bandwidth: bytes per second, read and written, that kernels reach: the median of kernels.json.
        host_us_operator, host_us_kernel: host time to start an operator of PyTorch, or one of our kernels
            with the layer around it: hf-1b-m8-reshard.json, "flat" and "flat-fused".  A faster GPU waits.
        host_us_exchange: host time of one collective of tensor-parallel ranks; plan-1b-2.json, TP 2 with FP8.
        gpus_per_host: number of GPUs connected by NVLink.
        link_bandwidth: bytes per second that one GPU sends through NVLink in collectives;
            collectives-nccl-4.json.
        link_latency: seconds of a collective of few bytes; the same file.
        network_bandwidth: bytes per second that one GPU sends to other hosts: 400 Gbit/s, times 0.8.
            Assumed.
        network_latency: seconds that each further host of a collective adds.  Assumed.
        hidden_exchange: share of tensor-parallel communication that GEMMs hide: pretrain-1b-tp-2.json.
        felt_reduction: share of a hidden reduction's time by which the computation beside it takes longer, as
            they share multiprocessors and memory: grad-sync-8b-m16-2.json and -1b-m8-2-replay.json.
    """

    name: str = "H200"
    gpu_memory: float = 141e9
    workspaces: int = 2 * 32 * 2**20
    reserved_memory: float = 2.5e9
    fragmentation: float = 0.03
    fp8_flops: float = 1315e12
    fp8_block_flops: float = 1100e12
    bf16_flops: float = 690e12
    fp32_flops: float = 50e12
    attention_flops: float = 405e12
    attention_ramp: float = 700.0
    narrow_attention: float = 0.8
    memory_bandwidth: float = 3.84e12
    host_us_operator: float = 31.0
    host_us_kernel: float = 150.0
    host_us_exchange: float = 150.0
    gpus_per_host: int = 8
    link_bandwidth: float = 330e9
    link_latency: float = 20e-6
    network_bandwidth: float = 40e9
    network_latency: float = 5e-6
    hidden_exchange: float = 0.28
    felt_reduction: float = 0.48

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "name":
                continue
            if not isinstance(value, int | float) or not value >= 0:
                raise ValueError(
                    f"{field.name} of the machine is {value!r}; it must be a number of at least 0"
                )
            if value == 0 and field.name in DIVISORS:
                raise ValueError(
                    f"{field.name} of the machine is 0; it must be more, as times are divided by it"
                )
        if not isinstance(self.gpus_per_host, int):
            raise ValueError(
                f"gpus_per_host of the machine is {self.gpus_per_host!r}; it must be a whole number"
            )
        for name in ("hidden_exchange", "felt_reduction"):
            if getattr(self, name) > 1:
                raise ValueError(f"{name} of the machine is {getattr(self, name)}; it is a share of 1")

    @staticmethod
    def load(path: Path) -> Machine:
        """Reads a JSON object with numbers that differ from the default machine's.

        Raises:
            ValueError: if it is not such an object, or has a name that is not a number of a `Machine`; if the
                path is a URL.
        """
        found = json.loads(local_path(path).read_text())
        if not isinstance(found, dict):
            raise ValueError(f'{path} is no JSON object; it must be one, such as {{"bf16_flops": 690e12}}')
        names = [field.name for field in fields(Machine)]
        unknown = sorted(found.keys() - set(names))
        if unknown:
            raise ValueError(
                f"{path}: {unknown[0]!r} is no number of a Machine, which has {', '.join(names)}"
            )
        return replace(Machine(), **found)

    def with_gb(self, **fields_in_gb: float | None) -> Machine:
        """Returns a copy with the given numbers, in 10^9 bytes; None keeps a number."""
        given = {name: value * 1e9 for name, value in fields_in_gb.items() if value is not None}
        return replace(self, **given)  # type: ignore[arg-type]

    def gemm_flops(self, dtype: torch.dtype, recipe: Recipe | None) -> float:
        """The rate of GEMMs, in operations per second."""
        if recipe is not None:
            return self.fp8_block_flops if isinstance(recipe, BlockScaling) else self.fp8_flops
        return self.fp32_flops if dtype == torch.float32 else self.bf16_flops

    def attention_rate(self, seq: int, head_dim: int) -> float:
        """The rate of attention, in operations per second that a causal mask leaves."""
        width = 1.0 if head_dim >= 128 else self.narrow_attention
        return width * self.attention_flops * seq / (seq + self.attention_ramp)

    def usable_memory(self) -> float:
        """Bytes that a plan may use."""
        return (self.gpu_memory - self.reserved_memory) / (1 + self.fragmentation)
