"""Computation time of a GPU: GEMMs and attention by their operations, everything else by the bytes it moves.

In:   a `Job` and a `Machine`; sizes of one tensor-parallel rank, letters as in `activations.py`.
Out:  seconds of one layer, of embedding and head, and of the optimizer.
Next: `time.py` combines them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from flatfsdp.flat.layout import FlatLayout, Role
from flatfsdp.fp8 import DelayedScaling
from flatfsdp.plan.activations import FP8_BYTES, FP32_BYTES, Sizes, unfused_grad
from flatfsdp.plan.job import Job
from flatfsdp.plan.machine import Machine

BOTH_WAYS = 2 * FP8_BYTES
"""Bytes that are written for each element that is cast, by rows and by columns."""


class Work(NamedTuple):
    """Seconds of one pass of one microbatch, by kind."""

    gemms: float = 0.0
    attention: float = 0.0
    memory: float = 0.0

    @property
    def seconds(self) -> float:
        """The sum of all kinds."""
        return sum(self)


class Passes(NamedTuple):
    """The forward and backward of one microbatch."""

    forward: Work
    backward: Work


def layer(job: Job, machine: Machine) -> Passes:
    """Time of one microbatch in one layer.

    A GEMM takes 2 operations per weight and token forward and 4 backward; causal attention 2 h seq and 4 h
    seq. The GEMM of a weight gradient also reads and writes FP32 at its end, while it does not multiply; this
    is counted as bytes.

    Args:
        job: the job.
        machine: the machine.
    """
    z, config = Sizes.of(job), job.model
    weights = config.layer_weights // z.t
    gemm = 2 * weights * z.tokens / machine.gemm_flops(job.precision.compute, job.recipe)
    attention = 2 * z.tokens * z.h * config.seq / z.t / machine.attention_rate(config.seq, config.head_dim)
    forward, backward = (nbytes / machine.memory_bandwidth for nbytes in _layer_bytes(job))
    gradients = weight_grad_bytes(weights, job) / machine.memory_bandwidth
    return Passes(Work(gemm, attention, forward), Work(2 * gemm + gradients, 2 * attention, backward))


def _layer_bytes(job: Job) -> tuple[float, float]:
    """Bytes moved outside of GEMMs and attention, forward and backward.

    For each token:

        norm                       h (c + w) / s              w bytes are written: an operand's, or c
        rotation, split            (h + 2 k) 2 c / t
        cast of attention's result h (c + 2) / t              only in FP8
        residual added, norm       h (3 c + w) / s
        activation                 f (2 c + w) / t
        residual added             h 3 c / s

        cast of dy, twice          2 h (c + 2) / s            only in FP8
        activation                 f (3 c + 2 w) / t
        norm, twice                2 h 4 c / s
        rotation, joined           (h + 2 k) 2 c / t
        cast of d(query, key, value)   (h + 2 k) (c + 2) / t  only in FP8

    If no scale is known beforehand (all recipes but delayed scaling), results of norms and activations are
    written, measured and read again, and other casts are preceded by a pass that measures.  Casting weights
    in the layer, and transposing those stored in FP8, comes on top.
    """
    z = Sizes.of(job)
    c, qkv = z.c, z.h + 2 * z.k
    fp8 = 1 if job.is_fp8 else 0
    again = fp8 * (not isinstance(job.recipe, DelayedScaling))
    written = BOTH_WAYS + again * 3 * c if fp8 else c
    cast = fp8 * (c + BOTH_WAYS + again * c)
    forward = (
        z.h * (c + written + 3 * c + written + 3 * c) / z.s
        + (qkv * 2 * c + z.h * cast + z.f * (2 * c + written)) / z.t
    )
    backward = z.h * (2 * cast + 8 * c) / z.s + (z.f * (3 * c + 2 * written) + qkv * (2 * c + cast)) / z.t
    weights = job.model.layer_weights / z.t
    own = 0.0
    if fp8:
        unshards = 1 if job.reshard_after_forward else 1 / job.microbatches
        own = weights * (unshards * BOTH_WAYS if job.stores_fp8 else c + BOTH_WAYS + again * c)
    return z.tokens * forward, z.tokens * backward + own


def weight_grad_bytes(weights: int, job: Job) -> float:
    """Bytes of FP32 accumulation, averaged over microbatches: a write in the first, a read and a write later.

    A gradient that the GEMM does not accumulate is written and read besides.
    """
    return weights * FP32_BYTES * (2 - 1 / job.microbatches) + 2 * unfused_grad(weights, job)


def head(job: Job, machine: Machine) -> Passes:
    """Time of one microbatch in the last norm, the head and the loss, none of it in FP8.

    Logits are read once forward; backward reads them and overwrites them with their gradient.
    """
    z = Sizes.of(job)
    weights = z.h * z.vocab // z.t
    gemm = 2 * weights * z.tokens / machine.gemm_flops(job.precision.compute, None)
    forward = z.tokens * (z.vocab / z.t * z.c + 2 * z.h * z.c / z.s)
    backward = z.tokens * (2 * z.vocab / z.t * z.c + 3 * z.h * z.c / z.s) + weight_grad_bytes(weights, job)
    return Passes(
        Work(gemm, memory=forward / machine.memory_bandwidth),
        Work(2 * gemm, memory=backward / machine.memory_bandwidth),
    )


def embedding(job: Job, machine: Machine) -> Passes:
    """Time of one microbatch in the embedding: rows are read and written; backward adds to them in FP32."""
    z = Sizes.of(job)
    forward, backward = z.tokens * z.h * 2 * z.c, z.tokens * z.h * (z.c + 2 * FP32_BYTES)
    return Passes(
        Work(memory=forward / machine.memory_bandwidth), Work(memory=backward / machine.memory_bandwidth)
    )


def optimizer(units: Sequence[Sequence[FlatLayout]], job: Job, machine: Machine) -> float:
    """Seconds of AdamW over all shards, once a step.

    For each element it reads gradient, parameter and two moments, and writes the last three, all FP32, and
    the compute shard; the gradient norm reads gradients before.  FP8 weights are cast in the next forward:
    read, and written in one byte.
    """
    precision, total = job.precision, 0
    for layout in (layout for unit in units for layout in unit):
        is_fp8 = layout.role is Role.FP8 and job.stores_fp8
        casts = precision.compute != precision.param and not is_fp8
        each = 8 * FP32_BYTES + casts * precision.compute.itemsize + is_fp8 * (FP32_BYTES + FP8_BYTES)
        total += each * layout.shard_numel(job.ranks.dp_shard)
    return total / machine.memory_bandwidth
