"""Runs of parameters, many of which an optimizer's kernel updates in one launch.

A run is a stretch of memory that is updated alike: an ordinary parameter, a portion of a flat shard, or one
weight's part of it.  Besides the parameter it may have outputs for the next forward, rounded to the `dtype`
that the model computes in, one for the whole call:

    compute = round(param)
    amax    = max(amax, max |round(param)|);  NaN wins

A run without a gradient keeps its parameter and states: only copy and amax are written.

A step may be skipped by a number on the device that the host does not know (`taken`): parameters and states
then keep their bits, whatever the gradients are, and copy and amax are those of the unchanged parameter.

Everything about the runs is passed in one table (`device_table`), one column per run, with these rows:

    0 first block   1 elements   addresses: 2 param   3 grad   4 compute   5 amax   6 on_device   (0 for none)
    7 ...           the bits of the FP32 numbers that the host knows, then the addresses of the states

So one compiled kernel serves lists of any length.  A program updates one block of one run; it finds its
`place` by `place_of_program`, and with it the table's entries for this run.

In:   a list of `Run`, which an operator takes as `Columns` and a kernel as a `Table`.
Next: `adamw.py` and `sgd.py`, which have the formulas.

Arguments shared by functions of kernels:

    place      (address of the run's column in the table, n, the program's first element in the run)
    ROW        row of the table, as above
    mask       elements of the block that the run has
        taken_ptr  one FP32 number: 0 skips the step; None: it is not skipped
    GRAD       dtype of the gradients;  DTYPE  dtype of the copies, None without copies and amaxes
    BLOCK      elements of one program
    ALIGNED    all tensors but amaxes start at multiples of 16 bytes
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flatfsdp.kernels.shared.outputs import HIGH_DTYPES, check_scalar, magnitude_bits, raise_amax
from flatfsdp.kernels.shared.tables import device_table, first_blocks, is_aligned, tensor_of_block
from flatfsdp.kernels.shared.tiles import find, power_of_two
from flatfsdp.kernels.shared.triton import cdiv, jit, on_device_of, tl


class Run(NamedTuple):
    """A stretch of elements that are updated alike; all tensors but `amax` of one shape, all on one device.

    Attributes:
        param: updated in place.  The kernels need contiguous FP32; anything else is updated in plain PyTorch.
        grad: only read; None leaves the parameter and the states as they are.
        states: states of the optimizer, updated in place.
        numbers: numbers of the optimizer's formula, such as a learning rate.
        on_device: further numbers, which the device computes from a count of steps: FP32, contiguous (FP64
            for an FP64 parameter); or None.
        compute: set to the new values, in the dtype of the call; or None.
        amax: FP32, one element, raised to the largest magnitude of the new values; or None.
    """

    param: Tensor
    grad: Tensor | None
    states: Sequence[Tensor]
    numbers: Sequence[float]
    on_device: Tensor | None = None
    compute: Tensor | None = None
    amax: Tensor | None = None


class Columns(NamedTuple):
    """Runs in the form that operators take: a list for each field of `Run`, with empty tensors for None."""

    params: list[Tensor]
    grads: list[Tensor]
    states: list[list[Tensor]]
    numbers: list[float]
    on_device: list[Tensor]
    computes: list[Tensor]
    amaxes: list[Tensor]

    @staticmethod
    def of(runs: Sequence[Run]) -> Columns:
        """The columns of a nonempty list of runs."""
        none = runs[0].param.new_empty(0)
        # In the dtype of all gradients, which a kernel reads from the first one.
        no_grad = next((run.grad.new_empty(0) for run in runs if run.grad is not None), none)
        return Columns(
            [run.param for run in runs],
            [no_grad if run.grad is None else run.grad for run in runs],
            [list(states) for states in zip(*(run.states for run in runs), strict=True)],
            [number for run in runs for number in run.numbers],
            [none if run.on_device is None else run.on_device for run in runs],
            [none if run.compute is None else run.compute for run in runs],
            [none if run.amax is None else run.amax for run in runs],
        )

    @property
    def tensors(self) -> list[list[Tensor]]:
        """Lists of tensors with the parameters' shapes, in the order of the table."""
        return [self.params, self.grads, self.computes, *self.states]

    @property
    def fits_a_kernel(self) -> bool:
        """Whether parameters are FP32, and all tensors contiguous and of a dtype that kernels read."""
        is_plain = all(t.dtype in HIGH_DTYPES and t.is_contiguous() for row in self.tensors for t in row)
        return is_plain and all(param.dtype == torch.float32 for param in self.params)


def check_runs(
    runs: Sequence[Run], grad_scale: Tensor | None, taken: Tensor | None, dtype: torch.dtype | None
) -> None:
    """Check the runs of one call.

    Raises:
        ValueError: if the tensors of a run do not fit each other, or two runs differ in dtypes or device.
    """
    first = runs[0]
    names = ["compute", "param", "grad", *(f"states[{i}]" for i in range(len(first.states)))]
    grad_dtype = next((run.grad.dtype for run in runs if run.grad is not None), None)
    kinds = [dtype, first.param.dtype, grad_dtype, *(state.dtype for state in first.states)]
    device, wide = first.param.device, torch.promote_types(first.param.dtype, torch.float32)
    for index, run in enumerate(runs):
        if len(run.states) != len(first.states):
            raise ValueError(
                f"run 0 has {len(first.states)} states and run {index} has {len(run.states)}; take two calls"
            )
        shape = run.param.shape
        tensors = [run.compute, run.param, run.grad, *run.states]
        for name, kind, tensor in zip(names, kinds, tensors, strict=True):
            if tensor is not None and (tensor.dtype, tensor.shape, tensor.device) != (kind, shape, device):
                raise ValueError(
                    f"{name} of run {index} is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}; it "
                    f"must be {kind} on {device} as in all of this call, and of shape {tuple(shape)}"
                )
        if run.amax is not None and dtype is None:
            raise ValueError(f"run {index} has an amax, which is of rounded values; pass their dtype")
        check_scalar(f"amax of run {index}", run.amax, run.param)
        given = run.on_device
        if given is not None and not (
            given.dtype in (torch.float32, wide) and given.device == device and given.is_contiguous()
        ):
            raise ValueError(
                f"on_device of run {index} is {given.dtype} {tuple(given.shape)} on {given.device}; it must "
                f"be contiguous, in {wide} on {device}"
            )
    check_scalar("taken", taken, first.param)
    scale = grad_scale
    if scale is not None and (scale.numel(), scale.dtype, scale.device) != (1, wide, device):
        raise ValueError(
            f"grad_scale is {scale.dtype} {tuple(scale.shape)} on {scale.device}; it must be one number in "
            f"{wide} on {device}"
        )


def write_new(target: Tensor, value: Tensor, taken: Tensor | None) -> None:
    """Write a new value in plain PyTorch, if the step is taken."""
    value = value.to(target.dtype)
    target.copy_(value if taken is None else torch.where(taken != 0, value, target))


def write_rounded(param: Tensor, compute: Tensor, amax: Tensor, dtype: torch.dtype | None) -> None:
    """Write the copy and the amax of new values in plain PyTorch; empty tensors are not written."""
    if dtype is None or not param.numel():
        return
    rounded = param.to(dtype)
    if compute.numel():
        compute.copy_(rounded)
    if amax.numel():
        # torch.maximum and torch.amax keep NaN.
        amax.copy_(torch.maximum(amax, rounded.abs().amax()))


class Table(NamedTuple):
    """Runs in the form that kernels take.

    Attributes:
        rows: int64 [rows, n], on the device, laid out as in the module's docstring.
        blocks: number of programs that update all of them.
        aligned: whether everything starts at a multiple of the widest load.
    """

    rows: Tensor
    blocks: int
    aligned: bool


def table_of(columns: Columns, block: int) -> Table:
    """Make the table of runs; `block` is the number of elements of a program."""
    starts, blocks = first_blocks([cdiv(param.numel(), block) for param in columns.params])
    of_elements = [[tensor.data_ptr() for tensor in row] for row in columns.tensors]
    bits = torch.tensor(columns.numbers, dtype=torch.float32, device="cpu").view(torch.int32)
    rows = [
        starts,
        [param.numel() for param in columns.params],
        *of_elements[:3],
        [amax.data_ptr() for amax in columns.amaxes],
        [numbers.data_ptr() for numbers in columns.on_device],
        *bits.view(len(starts), -1).t().tolist(),
        *of_elements[3:],
    ]
    aligned = all(is_aligned(*row) for row in columns.tensors)
    return Table(device_table(rows, columns.params[0].device), blocks, aligned)


def launch_runs(
    kernel: Any,
    name: str,
    columns: Columns,
    grad_scale: Tensor | None,
    taken: Tensor | None,
    constants: Sequence[Any],
) -> None:
    """Start an optimizer's kernel on all runs.

    Args:
        kernel: takes (table, n, grad_scale, taken, N_POW2, *constants, BLOCK, ALIGNED).
        name: name of the kernel in the table of tiles.
        columns: the runs.
        grad_scale: FP32, one element, or None.
        taken: FP32, one element, or None.
        constants: the kernel's constexprs after N_POW2, such as Triton's dtypes of the gradients.
    """
    tile = find(name, torch.float32, 1)
    table, n = table_of(columns, tile.cols), len(columns.params)
    with on_device_of(columns.params[0]):
        kernel[(table.blocks,)](
            *(table.rows, n, grad_scale, taken, power_of_two(n), *constants, tile.cols, table.aligned),
            **tile.options,
            enable_fp_fusion=False,  # no product and sum become one operation, as in the reference
        )


@jit
def place_of_program(
    table_ptr,  # as the head of this file says [rows, n], int64
    n,  # number of runs
    N_POW2: tl.constexpr,  # n, rounded up to a power of two
    BLOCK: tl.constexpr,
):
    """Find the program's `place`, and how many elements the run has from there."""
    block = tl.program_id(0)
    run_ptr = table_ptr + tensor_of_block(table_ptr, n, block, N_POW2)
    start = (block - tl.load(run_ptr)) * BLOCK
    return (run_ptr, n, start), tl.load(run_ptr + n) - start


@jit
def field(place, ROW: tl.constexpr):
    """The table's entry in row ROW for this run: an int64."""
    run_ptr, n, _ = place
    return tl.load(run_ptr + ROW * n)


@jit
def number(place, ROW: tl.constexpr):
    """A number of this run, from a row of the table that holds the bits of FP32 numbers."""
    return field(place, ROW).to(tl.int32).to(tl.float32, bitcast=True)


@jit
def number_on_device(place, INDEX: tl.constexpr):
    """A number of this run from `on_device`, FP32."""
    return tl.load(field(place, 6).to(tl.pointer_type(tl.float32)) + INDEX, field(place, 6) != 0, 0.0)


@jit
def elements(place, ROW: tl.constexpr, DTYPE: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr):
    """Pointers to the program's block of the tensor whose address is in this row; DTYPE is its dtype."""
    first = field(place, ROW).to(tl.pointer_type(DTYPE)) + place[2]
    if ALIGNED:
        # Triton derives this for arguments, but not for loaded addresses.
        first = tl.multiple_of(first, 16)
    return first + tl.arange(0, BLOCK)


@jit
def load_grad(place, mask, grad_scale_ptr, GRAD: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr):
    """The gradient of the program's block in FP32, times the scale of all gradients."""
    has_grad = field(place, 3) != 0
    grad = tl.load(elements(place, 3, GRAD, BLOCK, ALIGNED), mask & has_grad, 0.0).to(tl.float32)
    if grad_scale_ptr is not None:
        grad *= tl.load(grad_scale_ptr)
    return grad


@jit
def written(place, mask, taken_ptr):
    """The elements of the block that get new values: none without a gradient, or if the step is skipped."""
    mask = mask & (field(place, 3) != 0)
    if taken_ptr is not None:
        mask = mask & (tl.load(taken_ptr).to(tl.int32) != 0)
    return mask


@jit
def store_rounded(place, param, mask, DTYPE: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr):
    """Store the copy and the amax of new values, FP32, where the run has them."""
    if DTYPE is not None:
        rounded = param.to(DTYPE)
        tl.store(elements(place, 4, DTYPE, BLOCK, ALIGNED), rounded, mask & (field(place, 4) != 0))
        if field(place, 5) != 0:
            largest = tl.max(magnitude_bits(tl.where(mask, rounded.to(tl.float32), 0.0)))
            raise_amax(field(place, 5).to(tl.pointer_type(tl.int32)), largest)
