"""Memory of activations: what a microbatch's forward saves, and what its backward needs besides.

In:   a `Job`; sizes of one tensor-parallel rank.
Out:  bytes, equal to what autograd saves (`tests/dist/plan/test_plan.py` counts it).
Next: `memory.py` multiplies them by the microbatches in flight.

Letters: h = hidden, f = ffn, k = hidden size of keys; t = tensor-parallel ranks, s = t with sequence
parallelism, else 1; c = bytes of the compute dtype; o = bytes of a GEMM's operand, 1 in FP8; p = bytes of an
element in an all-gather of rows: c with block scaling, whose blocks span the rows of several ranks, else o.
"""

from __future__ import annotations

from dataclasses import dataclass

from flatfsdp.fp8 import BlockScaling, DelayedScaling
from flatfsdp.plan.job import Job

FP8_BYTES = 1
FP32_BYTES = 4
ID_BYTES = 8
BLOCK = 128
"""Number of elements that share a scale in block scaling."""


@dataclass(frozen=True)
class Sizes:
    """The letters above for one job; `tokens` are those of one microbatch."""

    tokens: int
    h: int
    f: int
    k: int
    heads: int
    vocab: int
    t: int
    s: int
    c: int
    o: int
    p: int

    @staticmethod
    def of(job: Job) -> Sizes:
        """The sizes of a job."""
        model, ranks = job.model, job.ranks
        c = job.precision.compute.itemsize
        o = FP8_BYTES if job.is_fp8 else c
        return Sizes(
            tokens=job.tokens,
            h=model.hidden,
            f=model.ffn,
            k=model.kv_heads * model.head_dim,
            heads=model.heads,
            vocab=model.vocab,
            t=ranks.tp,
            s=ranks.sequence_ranks,
            c=c,
            o=o,
            p=c if isinstance(job.recipe, BlockScaling) else o,
        )


def saved_by_layer(job: Job) -> int:
    """Bytes that one `TransformerLayer` saves.

    For each token:

        inputs of both norms, and 1 / rms   2 (h c + 4) / s
        results of both norms               2 h o / s          GEMM operands; p where rows are gathered
        query, key, value                   (h + 2 k) c / t    rotated
        attention's result, and log sums    (h c + 4 heads) / t
        operand of the output projection    h o / t            in FP8; otherwise the result itself
        gate and up                         2 f c / t
        operand of down                     f o / t

    Weights that the layer itself casts to FP8 are saved, too, one byte each, and so are the scales of block
    scaling: one for 128 elements of an activation, or 128 x 128 of a weight.
    """
    z = Sizes.of(job)
    norms = 2 * (z.h * z.c + FP32_BYTES + z.h * (z.p if z.s > 1 else z.o))
    attention = 2 * (z.h + z.k) * z.c + FP32_BYTES * z.heads
    operands = (job.is_fp8 * z.h + z.f) * z.o
    saved = z.tokens * norms // z.s + z.tokens * (attention + operands + 2 * z.f * z.c) // z.t
    weights = job.model.layer_weights // z.t
    if job.is_fp8 and not job.stores_fp8:
        saved += weights * FP8_BYTES
    if isinstance(job.recipe, BlockScaling):
        elements = (z.h + z.f) // z.t + (2 * z.h if z.s == 1 else 0)
        saved += (z.tokens * elements // BLOCK + weights // BLOCK**2) * FP32_BYTES
    return saved


def saved_by_head(job: Job) -> int:
    """Bytes that the last norm and the head save, without the logits.

    For each token: (2 h c + 4) / s for the norm's input and result, the target, three statistics of its
    logits, and the logarithm of their sum.
    """
    z = Sizes.of(job)
    return z.tokens * (2 * z.h * z.c + FP32_BYTES) // z.s + z.tokens * (ID_BYTES + 4 * FP32_BYTES)


def logits(job: Job) -> int:
    """Bytes of one microbatch's logits, which their gradient overwrites."""
    z = Sizes.of(job)
    return z.tokens * z.vocab // z.t * z.c


def between_stages(job: Job) -> int:
    """Bytes that one pipeline stage sends the next in one microbatch."""
    z = Sizes.of(job)
    return z.tokens * z.h * z.c // z.s


def backward_of_layer(job: Job) -> int:
    """Largest number of bytes that a layer's backward needs besides what was saved.

    The peak is at the activation.  For each token there are the gradients of its result (f c / t), of gate
    and up (2 f c / t, except with delayed scaling, which casts them in the same kernel), and in FP8 their
    operands, by rows and by columns (4 f / t).  A weight gradient that is not fused comes on top.
    """
    z = Sizes.of(job)
    high = 0 if isinstance(job.recipe, DelayedScaling) else 2 * z.f * z.c
    moving = z.tokens * (z.f * z.c + high + (4 * z.f * FP8_BYTES if job.is_fp8 else 0)) // z.t
    return moving + unfused_grad(2 * z.h * z.f // z.t, job)


def backward_of_head(job: Job) -> int:
    """Bytes that the head's backward needs besides what was saved.

    They are the gradient of its input, and of its weight if that is not fused.
    """
    z = Sizes.of(job)
    return z.tokens * z.h * z.c // z.s + unfused_grad(z.h * z.vocab // z.t, job)


def unfused_grad(weights: int, job: Job) -> int:
    """Bytes of a gradient that exists before it is accumulated; 0 if the GEMM accumulates it."""
    if job.fuse_wgrad_accumulation is True:
        return 0
    two_passes = job.fuse_wgrad_accumulation == "two_pass"
    return weights * (FP32_BYTES if two_passes else job.precision.compute.itemsize)
