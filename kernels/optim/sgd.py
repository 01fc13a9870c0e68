"""SGD with momentum over many runs of parameters, with their copies for the next forward.

For each element, in FP32, with a scale s for all gradients (clipping, the inverse of a loss scale):

    g = s * grad + weight_decay param
    b = g                                    in the first step (b is not read then)
    b = momentum b + (1 - dampening) g       later
    d = b,  or g + momentum b with Nesterov's momentum (Sutskever et al., 2013),  or g without momentum
    param = param - lr d
    compute = round(param);  amax = max(amax, max |round(param)|)

This is PyTorch's SGD.  Whether a step is the first one is decided on the device, by a count of the steps that
were not skipped (`taken` in `runs.py`).  Each operation rounds to nearest and no two are contracted, so that
reference and kernel are bit-equal.

Bytes per element: 20 with an FP32 gradient and momentum (8 of them written), 12 without momentum; 2 more for
a bf16 copy.  A skipped step writes only the copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flatfsdp.kernels.optim.runs import (
    Columns,
    Run,
    check_runs,
    elements,
    launch_runs,
    load_grad,
    number,
    number_on_device,
    place_of_program,
    store_rounded,
    write_new,
    write_rounded,
    written,
)
from flatfsdp.kernels.shared.ops import operator
from flatfsdp.kernels.shared.triton import jit, tl, triton_dtype


class Numbers(NamedTuple):
    """Numbers of the formula, from the hyperparameters.

    Attributes:
        rest: 1 - dampening.
    """

    lr: float
    weight_decay: float
    momentum: float = 0.0
    rest: float = 1.0


def reference(
    like: Tensor,
    params: list[Tensor],
    grads: list[Tensor],
    buffers: list[Tensor],
    numbers: list[float],
    on_device: list[Tensor],
    computes: list[Tensor],
    amaxes: list[Tensor],
    grad_scale: Tensor | None,
    taken: Tensor | None,
    nesterov: bool,
    dtype: torch.dtype | None,
) -> None:
    for index, (param, compute, amax) in enumerate(zip(params, computes, amaxes, strict=True)):
        own = Numbers(*numbers[4 * index : 4 * index + 4])
        buffer = buffers[index] if buffers else None
        if grads[index].shape == param.shape:
            _update(param, grads[index], buffer, own, on_device[index], grad_scale, taken, nesterov)
        write_rounded(param, compute, amax, dtype)


def _update(
    param: Tensor,
    grad: Tensor,
    buffer: Tensor | None,
    numbers: Numbers,
    step: Tensor,
    grad_scale: Tensor | None,
    taken: Tensor | None,
    nesterov: bool,
) -> None:
    """Update one run in plain PyTorch, in FP32 at least."""
    wide = torch.promote_types(param.dtype, torch.float32)
    old, g = param.to(wide), grad.to(wide)
    if grad_scale is not None:
        g = g * grad_scale
    direction = g = g + old * numbers.weight_decay
    if buffer is not None:
        b = torch.where(step <= 1, g, buffer.to(wide) * numbers.momentum + g * numbers.rest)
        direction = g + b * numbers.momentum if nesterov else b
        write_new(buffer, b, taken)
    write_new(param, old - direction * numbers.lr, taken)


@jit
def _update_block(
    place,
    mask,
    grad_scale_ptr,
    taken_ptr,
    GRAD: tl.constexpr,
    BUFFER: tl.constexpr,
    NESTEROV: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Update one block; arguments are those of `_sgd_kernel`, and `place` and `mask` as in `runs.py`."""
    # Rows of the table: 2 param, 3 grad, 6 count of steps, 7 to 10 `Numbers`, 11 momentum buffer.
    param_ptr = elements(place, 2, tl.float32, BLOCK, ALIGNED)
    lr, weight_decay = number(place, 7), number(place, 8)
    param = tl.load(param_ptr, mask, 0.0)
    g = load_grad(place, mask, grad_scale_ptr, GRAD, BLOCK, ALIGNED)
    g += param * weight_decay
    direction = g
    is_new = written(place, mask, taken_ptr)
    if BUFFER is not None:
        momentum, rest, is_first = number(place, 9), number(place, 10), number_on_device(place, 0) <= 1
        buffer_ptr = elements(place, 11, BUFFER, BLOCK, ALIGNED)
        b = tl.load(buffer_ptr, mask & (not is_first), 0.0).to(tl.float32)
        b = tl.where(is_first, g, b * momentum + g * rest)
        tl.store(buffer_ptr, b.to(BUFFER), is_new)
        direction = g + b * momentum if NESTEROV else b
    new = param - direction * lr
    tl.store(param_ptr, new, is_new)
    param = tl.where(is_new, new, param)
    store_rounded(place, param, mask, DTYPE, BLOCK, ALIGNED)


@jit
def _sgd_kernel(
    table_ptr,  # the runs [12, n], or [11, n] without momentum, int64, as in `runs.py`
    n,  # number of runs
    grad_scale_ptr,  # what all gradients are multiplied by, one FP32 number; None: nothing
    taken_ptr,  # one FP32 number, 0 leaves the step out; None: it is taken
    N_POW2: tl.constexpr,  # n, rounded up to a power of two
    GRAD: tl.constexpr,  # dtype of the gradients
    BUFFER: tl.constexpr,  # dtype of the momentum buffers; None: there are none
    NESTEROV: tl.constexpr,  # take Nesterov's momentum
    DTYPE: tl.constexpr,  # dtype of the copies, and of rounding for an amax; None: no run has either
    BLOCK: tl.constexpr,  # elements of one program
    ALIGNED: tl.constexpr,  # all tensors but amaxes start at multiples of 16 bytes
):
    """Update one block of one run."""
    place, left = place_of_program(table_ptr, n, N_POW2, BLOCK)
    if left >= BLOCK:
        # With a uniform mask, loads are as wide as possible.
        inside = tl.full([BLOCK], 1, tl.int1)
        _update_block(place, inside, grad_scale_ptr, taken_ptr, GRAD, BUFFER, NESTEROV, DTYPE, BLOCK, ALIGNED)
    else:
        inside = tl.arange(0, BLOCK) < left
        _update_block(place, inside, grad_scale_ptr, taken_ptr, GRAD, BUFFER, NESTEROV, DTYPE, BLOCK, ALIGNED)


def launch(
    like: Tensor,
    params: list[Tensor],
    grads: list[Tensor],
    buffers: list[Tensor],
    numbers: list[float],
    on_device: list[Tensor],
    computes: list[Tensor],
    amaxes: list[Tensor],
    grad_scale: Tensor | None,
    taken: Tensor | None,
    nesterov: bool,
    dtype: torch.dtype | None,
) -> None:
    columns = Columns(params, grads, [buffers] if buffers else [], numbers, on_device, computes, amaxes)
    if columns.fits_a_kernel:
        buffer = triton_dtype(buffers[0].dtype if buffers else None)
        constants = [triton_dtype(grads[0].dtype), buffer, nesterov, triton_dtype(dtype)]
        launch_runs(_sgd_kernel, "sgd", columns, grad_scale, taken, constants)
    else:
        rest = numbers, on_device, computes, amaxes, grad_scale, taken, nesterov, dtype
        reference(like, params, grads, buffers, *rest)


# `like` exists for the dispatch, which reads the first argument.
_sgd = operator(
    "sgd_(Tensor like, Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] buffers, float[] numbers, "
    "Tensor[] on_device, Tensor(c!)[] computes, Tensor(d!)[] amaxes, Tensor? grad_scale, Tensor? taken, "
    "bool nesterov, ScalarType? dtype) -> ()",
    reference=reference,
    launch=launch,
)


def sgd(
    runs: Sequence[Run],
    *,
    grad_scale: Tensor | None = None,
    taken: Tensor | None = None,
    nesterov: bool = False,
    dtype: torch.dtype | None = None,
) -> None:
    """Take one step for all runs, in place: one launch on CUDA.

    Args:
        runs: with `Numbers` and states [momentum buffer], or no states in any run; with states, on the device
            the number of steps of the parameter, including this one.  All of one dtype per field.
        grad_scale: FP32, one element on the runs' device; multiplies every gradient.
        taken: FP32, one element on the runs' device; 0 skips the step.
        nesterov: use Nesterov's momentum, for all runs; needs buffers.
        dtype: dtype of the copies, to which values are rounded for an amax; needed if a run has either.

    Raises:
        ValueError: if a tensor's dtype, shape or device does not fit.
    """
    if not runs:
        return
    check_runs(runs, grad_scale, taken, dtype)
    columns = Columns.of(runs)
    buffers = columns.states[0] if columns.states else []
    _sgd(
        *(columns.params[0], columns.params, columns.grads, buffers, columns.numbers, columns.on_device),
        *(columns.computes, columns.amaxes, grad_scale, taken, nesterov, dtype),
    )
