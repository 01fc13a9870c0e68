"""AdamW (Loshchilov and Hutter, 2019) over many runs of parameters, with their copies for the next forward.

For each element, in FP32, with step t and a scale s of all gradients (clipping, the inverse of a loss scale):

    g = s * grad
    m = m + (1 - beta1) (g - m)
    v = v + (1 - beta2) (g^2 - v)
    param = param - (lr weight_decay param + rate m / (sqrt(v) + eps'))
    compute = round(param);  amax = max(amax, max |round(param)|)

    rate = lr sqrt(1 - beta2^t) / (1 - beta1^t),  eps' = eps sqrt(1 - beta2^t)

This is PyTorch's AdamW; both bias corrections are in rate and eps'.  The device computes these, in FP64 for
all parameters at once (`bias_corrected`), because the host does not know how many steps were skipped (`taken`
in `runs.py`).  All changes of the parameter are added up first, so that a step rounds it once.  Each
operation rounds to nearest and no two are contracted, so that reference and kernel are bit-equal.

Moments may be stored in bf16.  They are rounded when they are stored; the parameter update uses them
unrounded.

Bytes per element: 28, FP32 gradient and moments, of which 12 are written; 2 more for a bf16 copy.  A skipped
step writes only the copy.
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
from flatfsdp.kernels.shared.tables import device_table
from flatfsdp.kernels.shared.triton import jit, tl, triton_dtype


class Numbers(NamedTuple):
    """Numbers of the formula that the host computes from the hyperparameters.

    Attributes:
        rest1, rest2: 1 - beta1 and 1 - beta2.
        decay: lr * weight_decay.
    """

    rest1: float
    rest2: float
    decay: float

    @staticmethod
    def of(lr: float, betas: tuple[float, float], weight_decay: float) -> Numbers:
        """The numbers of these hyperparameters."""
        return Numbers(1 - betas[0], 1 - betas[1], lr * weight_decay)


class Corrected(NamedTuple):
    """Hyperparameters of one parameter that the bias corrections change."""

    lr: float
    eps: float
    beta1: float
    beta2: float


def bias_corrected(
    steps: Sequence[Tensor], options: Sequence[Corrected], dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """Bias-corrected rate and eps' of each parameter, [2], which depend on the count of its steps.

    It takes seven launches and one small copy to the device, however many parameters there are.

    Args:
        steps: number of updates of each parameter, including this one: 0-dim, all on one device.
        options: hyperparameters of each parameter.
        dtype: dtype of the results, which are computed in FP64.
    """
    device = steps[0].device
    hyper = device_table(list(zip(*options, strict=True)), device, torch.float64)
    left = 1 - hyper[2:] ** torch.stack(list(steps))
    root = left[1].sqrt()
    numbers = hyper[:2] * root
    numbers[0] /= left[0]
    return numbers.new_empty(len(steps), 2, dtype=dtype).copy_(numbers.t()).unbind()


def reference(
    like: Tensor,
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    numbers: list[float],
    on_device: list[Tensor],
    computes: list[Tensor],
    amaxes: list[Tensor],
    grad_scale: Tensor | None,
    taken: Tensor | None,
    dtype: torch.dtype | None,
) -> None:
    own = [Numbers(*numbers[i : i + 3]) for i in range(0, len(numbers), 3)]
    for param, grad, exp_avg, exp_avg_sq, of_run, corrected in zip(
        params, grads, exp_avgs, exp_avg_sqs, own, on_device, strict=True
    ):
        if grad.shape == param.shape:
            _update(param, grad, exp_avg, exp_avg_sq, of_run, corrected, grad_scale, taken)
    for param, compute, amax in zip(params, computes, amaxes, strict=True):
        write_rounded(param, compute, amax, dtype)


def _update(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    numbers: Numbers,
    corrected: Tensor,
    grad_scale: Tensor | None,
    taken: Tensor | None,
) -> None:
    """Update one run in plain PyTorch, in FP32 at least."""
    wide = torch.promote_types(param.dtype, torch.float32)
    g, m, v, old = (tensor.to(wide) for tensor in (grad, exp_avg, exp_avg_sq, param))
    if grad_scale is not None:
        g = g * grad_scale
    m = m + (g - m) * numbers.rest1
    v = v + (g * g - v) * numbers.rest2
    # On a CPU, PyTorch's FP32 square root may be MKL's, which is not always correctly rounded.
    root = v.double().sqrt().to(wide)
    rate, eps = corrected.unbind()
    change = old * numbers.decay + m / (root + eps) * rate
    for target, value in ((param, old - change), (exp_avg, m), (exp_avg_sq, v)):
        write_new(target, value, taken)


@jit
def _update_block(
    place,
    mask,
    grad_scale_ptr,
    taken_ptr,
    GRAD: tl.constexpr,
    MOMENT: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Update one block; arguments are those of `_adamw_kernel`, and `place` and `mask` as in `runs.py`."""
    # Rows of the table: 2 param, 3 grad, 6 rate and eps', 7 to 9 `Numbers`, 10 exp_avg, 11 exp_avg_sq.
    param_ptr = elements(place, 2, tl.float32, BLOCK, ALIGNED)
    m_ptr = elements(place, 10, MOMENT, BLOCK, ALIGNED)
    v_ptr = elements(place, 11, MOMENT, BLOCK, ALIGNED)
    rest1, rest2, decay = number(place, 7), number(place, 8), number(place, 9)
    rate, eps = number_on_device(place, 0), number_on_device(place, 1)
    g = load_grad(place, mask, grad_scale_ptr, GRAD, BLOCK, ALIGNED)
    m = tl.load(m_ptr, mask, 0.0).to(tl.float32)
    v = tl.load(v_ptr, mask, 0.0).to(tl.float32)
    param = tl.load(param_ptr, mask, 0.0)
    m += (g - m) * rest1
    v += (g * g - v) * rest2
    # Triton's `/` and `sqrt` are not IEEE operations on a GPU.
    new = param - (param * decay + tl.div_rn(m, tl.sqrt_rn(v) + eps) * rate)
    is_new = written(place, mask, taken_ptr)
    tl.store(m_ptr, m.to(MOMENT), is_new)
    tl.store(v_ptr, v.to(MOMENT), is_new)
    tl.store(param_ptr, new, is_new)
    param = tl.where(is_new, new, param)
    store_rounded(place, param, mask, DTYPE, BLOCK, ALIGNED)


@jit
def _adamw_kernel(
    table_ptr,  # the runs [12, n], int64, as in `runs.py`
    n,  # number of runs
    grad_scale_ptr,  # what all gradients are multiplied by, one FP32 number; None: nothing
    taken_ptr,  # one FP32 number, 0 leaves the step out; None: it is taken
    N_POW2: tl.constexpr,  # n, rounded up to a power of two
    GRAD: tl.constexpr,  # dtype of the gradients
    MOMENT: tl.constexpr,  # dtype of both moments
    DTYPE: tl.constexpr,  # dtype of the copies, and of rounding for an amax; None: no run has either
    BLOCK: tl.constexpr,  # elements of one program
    ALIGNED: tl.constexpr,  # all tensors but amaxes start at multiples of 16 bytes
):
    """Update one block of one run."""
    place, left = place_of_program(table_ptr, n, N_POW2, BLOCK)
    if left >= BLOCK:
        # With a uniform mask, loads are as wide as possible.
        inside = tl.full([BLOCK], 1, tl.int1)
        _update_block(place, inside, grad_scale_ptr, taken_ptr, GRAD, MOMENT, DTYPE, BLOCK, ALIGNED)
    else:
        inside = tl.arange(0, BLOCK) < left
        _update_block(place, inside, grad_scale_ptr, taken_ptr, GRAD, MOMENT, DTYPE, BLOCK, ALIGNED)


def launch(
    like: Tensor,
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    numbers: list[float],
    on_device: list[Tensor],
    computes: list[Tensor],
    amaxes: list[Tensor],
    grad_scale: Tensor | None,
    taken: Tensor | None,
    dtype: torch.dtype | None,
) -> None:
    columns = Columns(params, grads, [exp_avgs, exp_avg_sqs], numbers, on_device, computes, amaxes)
    if columns.fits_a_kernel and exp_avgs[0].dtype == exp_avg_sqs[0].dtype:
        dtypes = [triton_dtype(kind) for kind in (grads[0].dtype, exp_avgs[0].dtype, dtype)]
        launch_runs(_adamw_kernel, "adamw", columns, grad_scale, taken, dtypes)
    else:
        rest = numbers, on_device, computes, amaxes, grad_scale, taken, dtype
        reference(like, params, grads, exp_avgs, exp_avg_sqs, *rest)


# `like` exists for the dispatch, which reads the first argument.
_adamw = operator(
    "adamw_(Tensor like, Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, "
    "Tensor(c!)[] exp_avg_sqs, float[] numbers, Tensor[] on_device, Tensor(d!)[] computes, "
    "Tensor(e!)[] amaxes, Tensor? grad_scale, Tensor? taken, ScalarType? dtype) -> ()",
    reference=reference,
    launch=launch,
)


def adamw(
    runs: Sequence[Run],
    *,
    grad_scale: Tensor | None = None,
    taken: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Take one step for all runs, in place: one launch on CUDA.

    Args:
        runs: with states [exp_avg, exp_avg_sq], `Numbers`, and on the device the result of `bias_corrected`.
            All of one dtype per field.
        grad_scale: FP32, one element on the runs' device; multiplies every gradient.
        taken: FP32, one element on the runs' device; 0 skips the step.
        dtype: dtype of the copies, to which values are rounded for an amax; needed if a run has either.

    Raises:
        ValueError: if a tensor's dtype, shape or device does not fit.
    """
    if not runs:
        return
    check_runs(runs, grad_scale, taken, dtype)
    columns = Columns.of(runs)
    _adamw(
        *(columns.params[0], columns.params, columns.grads, *columns.states, columns.numbers),
        *(columns.on_device, columns.computes, columns.amaxes, grad_scale, taken, dtype),
    )
