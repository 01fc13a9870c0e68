"""The weight gradient, accumulated by the GEMM itself into the flat FP32 buffer.

    target  = dy^T x           the first time  (what target held is not read)
    target += dy^T x           later           (one rounding: the FP32 product is added to target)

for dy [tokens, out], x [tokens, in] and target [out, in].  What runs on CUDA:

    FP8, bf16, fp16    cuBLASLt through nvmath-python, beta = 0 or 1, in place
    the same without nvmath-python, or where cuBLASLt has no fitting algorithm, and FP32
                       `torch._scaled_mm` or `torch.mm` into an FP32 temporary, which is copied or added

Hopper's FP8 GEMM reads both operands along K, which is tokens here, so FP8 operands come transposed:
dy_t [out, tokens] and x_t [in, tokens], as `cast(..., columnwise=True)` makes them.  There is no Triton GEMM
here: on H200 a plain one reaches 0.7 of cuBLASLt, and 0.7 to 0.8 of `torch._scaled_mm` with an add.

Bytes per element of the target, beyond the operands: 4 the first time and 8 later, in the GEMM's epilogue and
hidden behind its arithmetic; a temporary and an add are 16.

Bit for bit: a shape has one algorithm, without split-K, for beta = 0 and 1 and for every buffer.  In bf16 and
fp16, fused is then equal to unfused (`wgrad_unfused`): FP32 sums are added to the target with one rounding.
In FP8 it is if the scales are powers of two: scaling the sum is exact, and the rounding of the add is left;
with other scales the fused form may round once where the unfused one rounds twice.  `torch.addmm` in place
would not do: for beta = 1 cuBLAS may choose another algorithm than for beta = 0.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import threading
from functools import cache
from typing import Any

import torch
from flatfsdp.kernels._ops import operator
from flatfsdp.kernels._outputs import FP8_DTYPES, HIGH_DTYPES
from flatfsdp.kernels._triton import on_device_of
from flatfsdp.kernels.accumulate import accumulate
from flatfsdp.kernels.gemm import ALIGNMENT, FP8_PAIRS, check_scale_inv, scaled_mm
from torch import Tensor

_log = logging.getLogger(__name__)

MAX_WORKSPACE = 32 << 20
MAX_CANDIDATES = 64
"""Algorithms that cuBLASLt is asked for where its first choice without split-K will not do."""


def reference(target: Tensor, dy: Tensor, x: Tensor, first: bool) -> None:
    accumulate(target, dy.float().t() @ x.float(), first=first)


def launch(target: Tensor, dy: Tensor, x: Tensor, first: bool) -> None:
    with on_device_of(target):
        plan = _plan(target.device, (*target.shape, dy.shape[0]), dy.dtype, x.dtype, True)
        if plan is not None:
            plan.run(target, _readable(dy), _readable(x), None, first)
        elif dy.dtype == torch.float32:
            accumulate(target, torch.mm(dy.t(), x), first=first)
        else:
            accumulate(target, torch.mm(dy.t(), x, out_dtype=torch.float32), first=first)


_wgrad = operator(
    "wgrad_(Tensor(a!) target, Tensor dy, Tensor x, bool first) -> ()", reference=reference, launch=launch
)


def reference_fp8(
    target: Tensor,
    dy_t: Tensor,
    x_t: Tensor,
    dy_scale_inv: Tensor,
    x_scale_inv: Tensor,
    first: bool,
    split_accumulator: bool,
) -> None:
    # Products of FP8 numbers are exact in FP32; both accumulators of the GPU are less exact than this sum.
    product = dy_t.float() @ x_t.float().t()
    accumulate(target, product * (dy_scale_inv * x_scale_inv), first=first)


def launch_fp8(
    target: Tensor,
    dy_t: Tensor,
    x_t: Tensor,
    dy_scale_inv: Tensor,
    x_scale_inv: Tensor,
    first: bool,
    split_accumulator: bool,
) -> None:
    dy_t, x_t = _readable(dy_t), _readable(x_t)
    with on_device_of(target):
        shape = (*target.shape, dy_t.shape[1])
        plan = _plan(target.device, shape, dy_t.dtype, x_t.dtype, split_accumulator)
        if plan is not None:
            plan.run(target, dy_t, x_t, (dy_scale_inv, x_scale_inv), first)
            return
    product = scaled_mm(
        dy_t,
        x_t,
        dy_scale_inv,
        x_scale_inv,
        bias=None,
        out_dtype=torch.float32,
        split_accumulator=split_accumulator,
    )
    accumulate(target, product, first=first)


_wgrad_fp8 = operator(
    "wgrad_fp8_(Tensor(a!) target, Tensor dy_t, Tensor x_t, Tensor dy_scale_inv, Tensor x_scale_inv, "
    "bool first, bool split_accumulator) -> ()",
    reference=reference_fp8,
    launch=launch_fp8,
)


def _readable(operand: Tensor) -> Tensor:
    """As it is, or, where a plan cannot read it, copied: expanded gradients, slices at odd offsets."""
    if operand.is_contiguous() and operand.data_ptr() % ALIGNMENT == 0:
        return operand
    return operand.clone(memory_format=torch.contiguous_format)


@cache
def _cublas_lt() -> Any:
    """nvmath's module of cuBLASLt's functions, or None without nvmath-python; says once which it is."""
    try:
        cublas_lt = importlib.import_module("nvmath.bindings.cublasLt")
    except ImportError as error:
        _log.info(
            "Weight gradients: a GEMM into an FP32 temporary, then an add; nvmath-python would let the GEMM "
            "accumulate in place (%s)",
            error,
        )
        return None
    _log.info(
        "Weight gradients: cuBLASLt %d through nvmath-python, accumulating in place", cublas_lt.get_version()
    )
    return cublas_lt


# Of cudaDataType_t, cublasComputeType_t and cublasOperation_t in CUDA's headers.
_CUDA_TYPES = {
    torch.float32: 0,
    torch.float16: 2,
    torch.bfloat16: 14,
    torch.float8_e4m3fn: 28,
    torch.float8_e5m2: 29,
}
_COMPUTE_32F = 68
_TRANSPOSED, _NOT_TRANSPOSED = 1, 0

_ZERO, _ONE = ctypes.c_float(0.0), ctypes.c_float(1.0)
_ADDRESS_OF_ZERO, _ADDRESS_OF_ONE = ctypes.addressof(_ZERO), ctypes.addressof(_ONE)


@cache
def _handle(device: torch.device) -> int:
    """cuBLASLt's context on the current device, `device`; kept until the process ends."""
    return _cublas_lt().create()


@cache
def _plan(
    device: torch.device,
    shape: tuple[int, int, int],
    dy_dtype: torch.dtype,
    x_dtype: torch.dtype,
    split_accumulator: bool,
) -> _Plan | None:
    """The one plan of this GEMM, or None if it does not run in place; `shape` is out, in, tokens."""
    # FP32 is left to torch.mm, which knows whether TF32 is allowed.
    if dy_dtype == torch.float32 or 0 in shape or _cublas_lt() is None:
        return None
    plan = _Plan(device, shape, dy_dtype, x_dtype, split_accumulator)
    if plan.is_possible:
        return plan
    _log.info(
        "Weight gradient with out, in, tokens = %s of %s and %s: a GEMM into an FP32 temporary, then an add; "
        "cuBLASLt has no algorithm without split-K",
        shape,
        dy_dtype,
        x_dtype,
    )
    return None


def preferred_tile(shape: tuple[int, int, int], is_fp8: bool) -> str | None:
    """The tile of D that is faster on an H200 than that of cuBLASLt's first choice; None: no other is.

    Measured with beta = 1 over shapes of layers, 1024 to 8192 tokens.  cuBLASLt foresees neither that
    the epilogue reads and writes FP32 nor the clock that a GPU keeps up.  In 16 bits 128 x 160 takes
    1 to 9 % less time at 8192 tokens and 20 to 28 % less at 1024; for FP8 the first choice is within 2 % of
    the best but for few tokens, where 128 x 128 takes 4 to 13 % less.
    """
    out, inner, tokens = shape
    if out * inner < 1 << 22 or (is_fp8 and tokens > 1024):
        return None
    return "TILE_128x128" if is_fp8 or out * inner < 1 << 25 else "TILE_128x160"


class _Plan:
    """One GEMM shape on one device: descriptors, layouts, algorithm; made once and never freed.

    cuBLASLt thinks in columns first, so it computes the transpose of the target:

        D [in, out] = A^T B  with  A = x_t [tokens, in],  B = dy_t [tokens, out]     FP8
        D [in, out] = A B^T  with  A = x [in, tokens],    B = dy [out, tokens]       bf16, fp16

    Attributes:
        is_possible: whether there is an algorithm to run.
    """

    def __init__(
        self,
        device: torch.device,
        shape: tuple[int, int, int],
        dy_dtype: torch.dtype,
        x_dtype: torch.dtype,
        split_accumulator: bool,
    ) -> None:
        lt = self._lt = _cublas_lt()
        out, inner, tokens = shape
        is_fp8 = dy_dtype in FP8_DTYPES
        self._device = device
        self._handle = _handle(device)
        self._x_layout = self._layout(x_dtype, *((tokens, inner) if is_fp8 else (inner, tokens)))
        self._dy_layout = self._layout(dy_dtype, *((tokens, out) if is_fp8 else (out, tokens)))
        self._target_layout = self._layout(torch.float32, inner, out)
        self._operation = lt.matmul_desc_create(_COMPUTE_32F, _CUDA_TYPES[torch.float32])
        self._lock = threading.Lock()
        names = lt.MatmulDescAttribute
        self._describe(names.TRANSA, ctypes.c_int32(_TRANSPOSED if is_fp8 else _NOT_TRANSPOSED))
        self._describe(names.TRANSB, ctypes.c_int32(_NOT_TRANSPOSED if is_fp8 else _TRANSPOSED))
        # Where the scales are, in memory that stays: a call has 20 microseconds on the host.
        self._scale_addresses = (ctypes.c_int64 * 2)()
        self._scale_attributes = [
            (int(name), ctypes.addressof(self._scale_addresses) + index * ctypes.sizeof(ctypes.c_int64))
            for index, name in enumerate((names.A_SCALE_POINTER, names.B_SCALE_POINTER))
        ]
        if is_fp8:
            self._describe(names.FAST_ACCUM, ctypes.c_int8(not split_accumulator))
            # The choice may depend on whether there are scales, not on what they are.
            some_scale = torch.ones(1, device=device)
            self._point_at_scales(some_scale, some_scale)
        self._algorithm = self._choose_algorithm(preferred_tile(shape, is_fp8))
        self.is_possible = self._algorithm is not None
        if self.is_possible:
            # Read once, because these are computed; the algorithm is what a heuristic's result begins with.
            self._algorithm_address = self._algorithm.ptr
            self._workspace_size = self._algorithm.workspace_size

    def _layout(self, dtype: torch.dtype, rows: int, cols: int) -> int:
        """Of a matrix [rows, cols], columns first, without gaps."""
        return self._lt.matrix_layout_create(_CUDA_TYPES[dtype], rows, cols, rows)

    def _describe(self, name: int, value: Any) -> None:
        self._lt.matmul_desc_set_attribute(
            self._operation, name, ctypes.addressof(value), ctypes.sizeof(value)
        )

    def _point_at_scales(self, dy_scale_inv: Tensor, x_scale_inv: Tensor) -> None:
        self._scale_addresses[:] = [x_scale_inv.data_ptr(), dy_scale_inv.data_ptr()]
        for name, address in self._scale_attributes:
            self._lt.matmul_desc_set_attribute(self._operation, name, address, 8)

    def _choose_algorithm(self, tile: str | None) -> Any:
        """One without split-K, for any beta and any buffer: with this tile, or else cuBLASLt's first choice;
        None if it has none.

        Without split-K each element has one FP32 sum, to which beta adds the target once.  For few outputs
        and many tokens cuBLASLt may know no such algorithm if asked for no other, and yet name some among
        many of all kinds.
        """
        lt = self._lt
        if tile is not None:
            for found in self._heuristics(lt.ReductionScheme.MASK, MAX_CANDIDATES):
                its_tile = self._configured(found, lt.MatmulAlgoConfigAttribute.TILE_ID)
                if its_tile == lt.MatmulTile[tile] and self._sums_once(found):
                    return found
        for found in self._heuristics(lt.ReductionScheme.NONE, 1):
            return found
        for found in self._heuristics(lt.ReductionScheme.MASK, MAX_CANDIDATES):
            if self._sums_once(found):
                return found
        return None

    def _heuristics(self, reduction_schemes: int, wanted: int) -> list[Any]:
        """What cuBLASLt recommends, best first.

        Alignments are the least that is allowed rather than those of the first call's buffers.
        """
        lt = self._lt
        names = lt.MatmulPreferenceAttribute
        preference = lt.matmul_preference_create()
        for name, value in (
            (names.MAX_WORKSPACE_BYTES, ctypes.c_uint64(MAX_WORKSPACE)),
            (names.REDUCTION_SCHEME_MASK, ctypes.c_uint32(reduction_schemes)),
            (names.MIN_ALIGNMENT_A_BYTES, ctypes.c_uint32(ALIGNMENT)),
            (names.MIN_ALIGNMENT_B_BYTES, ctypes.c_uint32(ALIGNMENT)),
            (names.MIN_ALIGNMENT_C_BYTES, ctypes.c_uint32(ALIGNMENT)),
            (names.MIN_ALIGNMENT_D_BYTES, ctypes.c_uint32(ALIGNMENT)),
        ):
            lt.matmul_preference_set_attribute(
                preference, name, ctypes.addressof(value), ctypes.sizeof(value)
            )
        results, count = lt.MatmulHeuristicResult(wanted), ctypes.c_int32(0)
        try:
            lt.matmul_algo_get_heuristic(
                self._handle,
                self._operation,
                self._x_layout,
                self._dy_layout,
                self._target_layout,
                self._target_layout,
                preference,
                wanted,
                results.ptr,
                ctypes.addressof(count),
            )
        except lt.cuBLASLtError:  # NOT_SUPPORTED, rather than nothing found
            return []
        finally:
            lt.matmul_preference_destroy(preference)
        return [results[index] for index in range(count.value) if results[index].state == 0]

    def _sums_once(self, found: Any) -> bool:
        """Whether an algorithm has no split-K."""
        names, schemes = self._lt.MatmulAlgoConfigAttribute, self._lt.ReductionScheme
        splits, scheme = (
            self._configured(found, name) for name in (names.SPLITK_NUM, names.REDUCTION_SCHEME)
        )
        return splits <= 1 and scheme == schemes.NONE

    def _configured(self, found: Any, name: int) -> int:
        value, written = ctypes.c_int32(0), ctypes.c_size_t(0)
        self._lt.matmul_algo_config_get_attribute(
            found.ptr, name, ctypes.addressof(value), ctypes.sizeof(value), ctypes.addressof(written)
        )
        return value.value

    def run(
        self, target: Tensor, dy: Tensor, x: Tensor, scale_invs: tuple[Tensor, Tensor] | None, first: bool
    ) -> None:
        """dy and x as `_readable` gives them; `scale_invs` are theirs, in this order, in FP8."""
        if target.data_ptr() % ALIGNMENT:
            product = torch.empty_like(target)
            self._launch(product, dy, x, scale_invs, first=True)
            accumulate(target, product, first=first)
        else:
            self._launch(target, dy, x, scale_invs, first)

    def _launch(
        self, target: Tensor, dy: Tensor, x: Tensor, scale_invs: tuple[Tensor, Tensor] | None, first: bool
    ) -> None:
        size = self._workspace_size
        # Not kept: the allocator knows what each stream still uses, and plans run on any stream.
        workspace = torch.empty(size, dtype=torch.uint8, device=self._device) if size else None
        # Scales are part of the descriptor, and backwards run on several threads.
        with self._lock:
            if scale_invs is not None:
                self._point_at_scales(*scale_invs)
            self._lt.matmul(
                self._handle,
                self._operation,
                _ADDRESS_OF_ONE,
                x.data_ptr(),
                self._x_layout,
                dy.data_ptr(),
                self._dy_layout,
                _ADDRESS_OF_ZERO if first else _ADDRESS_OF_ONE,
                target.data_ptr(),
                self._target_layout,
                target.data_ptr(),
                self._target_layout,
                self._algorithm_address,
                0 if workspace is None else workspace.data_ptr(),
                size,
                torch._C._cuda_getCurrentRawStream(self._device.index),
            )


def wgrad(
    target: Tensor,
    dy: Tensor,
    x: Tensor,
    *,
    first: bool,
    dy_scale_inv: Tensor | None = None,
    x_scale_inv: Tensor | None = None,
    split_accumulator: bool = True,
) -> None:
    """Writes (`first`) or adds the weight gradient dy^T x to `target`, in place.

    Args:
        target: FP32 [out, in], contiguous; usually a slot of the unit's flat gradient buffer.
        dy: [tokens, out] in bf16, fp16 or FP32; in FP8 its transpose [out, tokens], contiguous.
        x: [tokens, in] in dy's dtype; in FP8 its transpose [in, tokens], contiguous.
        dy_scale_inv: FP8 only: FP32, one element, what dy is to be multiplied with (1 / scale of the cast).
        x_scale_inv: the same for x.
        split_accumulator: FP8 only: partial sums are moved to FP32 registers now and then, as in
            Transformer Engine's backward GEMMs.  False is fast accumulation, exact to about 13 bits.

    FP8 operands are E4M3 or E5M2, not both E5M2, and out, in and tokens are multiples of 16.

    Raises:
        ValueError: if shapes, dtypes or devices do not fit, or scales are missing or not expected.
    """
    _check_target(target, dy, x)
    if dy.dtype in FP8_DTYPES or x.dtype in FP8_DTYPES:
        _check_fp8(target, dy, x)
        dy_scale_inv = _checked_scale("dy_scale_inv", dy_scale_inv, target.device)
        x_scale_inv = _checked_scale("x_scale_inv", x_scale_inv, target.device)
        _wgrad_fp8(target, dy, x, dy_scale_inv, x_scale_inv, first, split_accumulator)
        return
    _check_high_precision(target, dy, x)
    if dy_scale_inv is not None or x_scale_inv is not None:
        raise ValueError(f"dy_scale_inv and x_scale_inv are for FP8 operands; dy is {dy.dtype}")
    _wgrad(target, dy, x, first)


def wgrad_unfused(
    target: Tensor,
    dy: Tensor,
    x: Tensor,
    *,
    first: bool,
    dy_scale_inv: Tensor | None = None,
    x_scale_inv: Tensor | None = None,
    split_accumulator: bool = True,
) -> None:
    """As `wgrad`, in two passes: the same GEMM into an FP32 temporary, which is then copied or added.

    What a gradient is that was not fused, and what the fused one is compared with, bit for bit.
    """
    product = torch.empty_like(target)
    wgrad(
        product,
        dy,
        x,
        first=True,
        dy_scale_inv=dy_scale_inv,
        x_scale_inv=x_scale_inv,
        split_accumulator=split_accumulator,
    )
    accumulate(target, product, first=first)


def _check_target(target: Tensor, dy: Tensor, x: Tensor) -> None:
    if target.dim() != 2 or target.dtype != torch.float32 or not target.is_contiguous():
        raise ValueError(
            f"target is {target.dtype} {tuple(target.shape)} with strides {target.stride()}; wgrad "
            "accumulates into a contiguous FP32 matrix"
        )
    if not target.device == dy.device == x.device:
        raise ValueError(
            f"target is on {target.device}, dy on {dy.device} and x on {x.device}; wgrad needs one device"
        )


def _check_high_precision(target: Tensor, dy: Tensor, x: Tensor) -> None:
    if dy.dtype not in HIGH_DTYPES or x.dtype != dy.dtype:
        raise ValueError(
            f"dy is {dy.dtype} and x {x.dtype}; wgrad takes both in bf16, both in fp16, both in FP32, or FP8"
        )
    if dy.dim() != 2 or x.dim() != 2 or (dy.shape[0], dy.shape[1], x.shape[1]) != (x.shape[0], *target.shape):
        raise ValueError(
            f"dy is {tuple(dy.shape)} and x {tuple(x.shape)}; for a target [out, in] = {tuple(target.shape)} "
            "they have to be [tokens, out] and [tokens, in]"
        )


def _check_fp8(target: Tensor, dy: Tensor, x: Tensor) -> None:
    if (dy.dtype, x.dtype) not in FP8_PAIRS:
        raise ValueError(
            f"dy is {dy.dtype} and x {x.dtype}; an FP8 GEMM takes two FP8 operands, at most one in E5M2"
        )
    if dy.dim() != 2 or x.dim() != 2 or (*target.shape, dy.shape[1]) != (dy.shape[0], x.shape[0], x.shape[1]):
        raise ValueError(
            f"dy is {tuple(dy.shape)} and x {tuple(x.shape)}; for a target [out, in] = {tuple(target.shape)} "
            "FP8 operands have to be transposed: [out, tokens] and [in, tokens]"
        )
    if not dy.is_contiguous() or not x.is_contiguous():
        raise ValueError("dy and x in FP8 have to be contiguous: cast them with columnwise=True")
    sizes = (*target.shape, dy.shape[1])
    if any(size == 0 or size % ALIGNMENT for size in sizes):
        raise ValueError(
            f"out, in and tokens are {sizes}; FP8 GEMMs need multiples of {ALIGNMENT}: pad them, or keep "
            "this layer in bf16"
        )


def _checked_scale(name: str, scale_inv: Tensor | None, device: torch.device) -> Tensor:
    if scale_inv is None:
        raise ValueError(f"{name} is missing; FP8 operands need the inverse of the scale they were cast with")
    check_scale_inv(name, scale_inv, device)
    return scale_inv
