"""The weight gradient, accumulated by the GEMM itself into the flat FP32 buffer.

    target  = dy^T x           the first time  (what target held is not read)
    target += dy^T x           later           (one rounding: the FP32 product is added to target)

for dy [tokens, out], x [tokens, in] and target [out, in].  What runs on CUDA:

    bf16, fp16    torch.mm / torch.addmm with out_dtype=torch.float32, in place
    FP32          torch.mm / torch.addmm, in place
    FP8           cuBLASLt through nvmath-python, beta = 0 or 1, in place; without nvmath-python
                  torch._scaled_mm into an FP32 temporary, then an add

Hopper's FP8 GEMM reads both operands along K, which is tokens here, so FP8 operands come transposed:
dy_t [out, tokens] and x_t [in, tokens], as `cast(..., columnwise=True)` makes them.  There is no Triton GEMM
here: on H200 a plain one reaches 0.7 of cuBLASLt, and 0.7 to 0.8 of `torch._scaled_mm` with an add.

Bytes per element of the target, beyond the operands: 4 the first time and 8 later, in the GEMM's epilogue and
hidden behind its arithmetic; a temporary and an add would be 16.

Bit for bit: an FP8 shape has one algorithm, without split-K, for beta = 0 and 1 and for every buffer.  Fused
is then equal to unfused (`wgrad_unfused`) if the scales are powers of two: scaling the sum is exact, and one
rounding, of the add, is left.  With other scales the fused form may round once where the unfused one rounds
twice.  For bf16 and fp16 there are no scales, and cuBLAS chooses the algorithm by the shape.
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
from flatfsdp.kernels._triton import on_device_of
from flatfsdp.kernels.accumulate import accumulate
from torch import Tensor

_log = logging.getLogger(__name__)

HIGH_PRECISION = (torch.bfloat16, torch.float16, torch.float32)
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)

ALIGNMENT = 16
"""FP8 GEMMs take sizes that are multiples of it, and addresses, in bytes, that are."""

MAX_WORKSPACE = 32 << 20


def reference(target: Tensor, dy: Tensor, x: Tensor, first: bool) -> None:
    accumulate(target, dy.float().t() @ x.float(), first=first)


def launch(target: Tensor, dy: Tensor, x: Tensor, first: bool) -> None:
    with on_device_of(target):
        if dy.dtype == torch.float32:
            if first:
                torch.mm(dy.t(), x, out=target)
            else:
                torch.addmm(target, dy.t(), x, out=target)
        elif first:
            torch.mm(dy.t(), x, out_dtype=torch.float32, out=target)
        else:
            torch.addmm(target, dy.t(), x, out_dtype=torch.float32, out=target)


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
    for name, tensor in (("target", target), ("dy", dy_t), ("x", x_t)):
        if tensor.data_ptr() % ALIGNMENT:
            raise ValueError(
                f"{name} does not start at a multiple of {ALIGNMENT} bytes, as FP8 GEMMs need; a slot of a "
                "flat buffer does"
            )
    with on_device_of(target):
        if _cublas_lt() is None:
            _scaled_mm(target, dy_t, x_t, dy_scale_inv, x_scale_inv, first, split_accumulator)
        else:
            shape = (*target.shape, dy_t.shape[1])
            plan = _plan(target.device, shape, dy_t.dtype, x_t.dtype, split_accumulator)
            plan.run(target, dy_t, x_t, dy_scale_inv, x_scale_inv, first)


_wgrad_fp8 = operator(
    "wgrad_fp8_(Tensor(a!) target, Tensor dy_t, Tensor x_t, Tensor dy_scale_inv, Tensor x_scale_inv, "
    "bool first, bool split_accumulator) -> ()",
    reference=reference_fp8,
    launch=launch_fp8,
)


def _scaled_mm(
    target: Tensor,
    dy_t: Tensor,
    x_t: Tensor,
    dy_scale_inv: Tensor,
    x_scale_inv: Tensor,
    first: bool,
    split_accumulator: bool,
) -> None:
    product = torch._scaled_mm(
        dy_t,
        x_t.t(),
        scale_a=dy_scale_inv,
        scale_b=x_scale_inv,
        out_dtype=torch.float32,
        use_fast_accum=not split_accumulator,
    )
    accumulate(target, product, first=first)


@cache
def _cublas_lt() -> Any:
    """nvmath's module of cuBLASLt's functions, or None without nvmath-python; says once which it is."""
    try:
        cublas_lt = importlib.import_module("nvmath.bindings.cublasLt")
    except ImportError as error:
        _log.info(
            "FP8 weight gradients: torch._scaled_mm into an FP32 temporary, then an add; nvmath-python would "
            "let the GEMM accumulate in place (%s)",
            error,
        )
        return None
    _log.info(
        "FP8 weight gradients: cuBLASLt %d through nvmath-python, accumulating in place",
        cublas_lt.get_version(),
    )
    return cublas_lt


# Of cudaDataType_t, cublasComputeType_t and cublasOperation_t in CUDA's headers.
_CUDA_TYPES = {torch.float32: 0, torch.float8_e4m3fn: 28, torch.float8_e5m2: 29}
_COMPUTE_32F = 68
_TRANSPOSED, _NOT_TRANSPOSED = 1, 0

_ZERO, _ONE = ctypes.c_float(0.0), ctypes.c_float(1.0)


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
) -> _Plan:
    """The one plan of this GEMM; `shape` is out, in, tokens."""
    return _Plan(device, shape, dy_dtype, x_dtype, split_accumulator)


class _Plan:
    """One FP8 GEMM shape on one device: descriptors, layouts, algorithm; made once and never freed.

    cuBLASLt thinks in columns first, so it computes the transpose of the target:

        D [in, out] = A^T B  with  A = x_t [tokens, in],  B = dy_t [tokens, out],  all columns first
    """

    def __init__(
        self,
        device: torch.device,
        shape: tuple[int, int, int],
        dy_dtype: torch.dtype,
        x_dtype: torch.dtype,
        split_accumulator: bool,
    ) -> None:
        lt = _cublas_lt()
        out, inner, tokens = shape
        self._device = device
        self._handle = _handle(device)
        self._x_layout = lt.matrix_layout_create(_CUDA_TYPES[x_dtype], tokens, inner, tokens)
        self._dy_layout = lt.matrix_layout_create(_CUDA_TYPES[dy_dtype], tokens, out, tokens)
        self._target_layout = lt.matrix_layout_create(_CUDA_TYPES[torch.float32], inner, out, inner)
        self._operation = lt.matmul_desc_create(_COMPUTE_32F, _CUDA_TYPES[torch.float32])
        self._lock = threading.Lock()
        names = lt.MatmulDescAttribute
        self._describe(names.TRANSA, ctypes.c_int32(_TRANSPOSED))
        self._describe(names.TRANSB, ctypes.c_int32(_NOT_TRANSPOSED))
        self._describe(names.FAST_ACCUM, ctypes.c_int8(not split_accumulator))
        # The choice may depend on whether there are scales, not on what they are.
        some_scale = torch.ones(1, device=device)
        self._point_at_scales(some_scale, some_scale)
        self._algorithm = self._choose_algorithm(shape)

    def _describe(self, name: int, value: Any) -> None:
        _cublas_lt().matmul_desc_set_attribute(
            self._operation, name, ctypes.addressof(value), ctypes.sizeof(value)
        )

    def _point_at_scales(self, dy_scale_inv: Tensor, x_scale_inv: Tensor) -> None:
        names = _cublas_lt().MatmulDescAttribute
        self._describe(names.A_SCALE_POINTER, ctypes.c_int64(x_scale_inv.data_ptr()))
        self._describe(names.B_SCALE_POINTER, ctypes.c_int64(dy_scale_inv.data_ptr()))

    def _choose_algorithm(self, shape: tuple[int, int, int]) -> Any:
        """cuBLASLt's first choice, for any beta and any buffer.

        Without split-K: each element then has one FP32 sum, to which beta adds the target once.  Alignments
        are the least that is allowed rather than those of the first call's buffers.
        """
        lt = _cublas_lt()
        names = lt.MatmulPreferenceAttribute
        preference = lt.matmul_preference_create()
        for name, value in (
            (names.MAX_WORKSPACE_BYTES, ctypes.c_uint64(MAX_WORKSPACE)),
            (names.REDUCTION_SCHEME_MASK, ctypes.c_uint32(lt.ReductionScheme.NONE)),
            (names.MIN_ALIGNMENT_A_BYTES, ctypes.c_uint32(ALIGNMENT)),
            (names.MIN_ALIGNMENT_B_BYTES, ctypes.c_uint32(ALIGNMENT)),
            (names.MIN_ALIGNMENT_C_BYTES, ctypes.c_uint32(ALIGNMENT)),
            (names.MIN_ALIGNMENT_D_BYTES, ctypes.c_uint32(ALIGNMENT)),
        ):
            lt.matmul_preference_set_attribute(
                preference, name, ctypes.addressof(value), ctypes.sizeof(value)
            )
        algorithm, found = lt.MatmulHeuristicResult(1), ctypes.c_int32(0)
        lt.matmul_algo_get_heuristic(
            self._handle,
            self._operation,
            self._x_layout,
            self._dy_layout,
            self._target_layout,
            self._target_layout,
            preference,
            1,
            algorithm.ptr,
            ctypes.addressof(found),
        )
        lt.matmul_preference_destroy(preference)
        if found.value == 0 or algorithm.state != 0:
            raise RuntimeError(
                f"cuBLASLt {lt.get_version()} has no FP8 GEMM of out, in, tokens = {shape} on "
                f"{self._device}; FP8 needs compute capability 8.9 or more"
            )
        return algorithm

    def run(
        self,
        target: Tensor,
        dy_t: Tensor,
        x_t: Tensor,
        dy_scale_inv: Tensor,
        x_scale_inv: Tensor,
        first: bool,
    ) -> None:
        lt = _cublas_lt()
        workspace_size = self._algorithm.workspace_size
        # Not kept: the allocator knows what each stream still uses, and plans run on any stream.
        workspace = torch.empty(workspace_size, dtype=torch.uint8, device=self._device)
        # Scales are part of the descriptor, and backwards run on several threads.
        with self._lock:
            self._point_at_scales(dy_scale_inv, x_scale_inv)
            lt.matmul(
                self._handle,
                self._operation,
                ctypes.addressof(_ONE),
                x_t.data_ptr(),
                self._x_layout,
                dy_t.data_ptr(),
                self._dy_layout,
                ctypes.addressof(_ZERO if first else _ONE),
                target.data_ptr(),
                self._target_layout,
                target.data_ptr(),
                self._target_layout,
                self._algorithm.ptr,  # the algorithm is what a heuristic's result begins with
                workspace.data_ptr(),
                workspace_size,
                torch.cuda.current_stream(self._device).cuda_stream,
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
        RuntimeError: if cuBLASLt has no FP8 GEMM for this shape or device.
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
    if dy.dtype not in HIGH_PRECISION or x.dtype != dy.dtype:
        raise ValueError(
            f"dy is {dy.dtype} and x {x.dtype}; wgrad takes both in bf16, both in fp16, both in FP32, or FP8"
        )
    if dy.dim() != 2 or x.dim() != 2 or (dy.shape[0], dy.shape[1], x.shape[1]) != (x.shape[0], *target.shape):
        raise ValueError(
            f"dy is {tuple(dy.shape)} and x {tuple(x.shape)}; for a target [out, in] = {tuple(target.shape)} "
            "they have to be [tokens, out] and [tokens, in]"
        )


def _check_fp8(target: Tensor, dy: Tensor, x: Tensor) -> None:
    kinds = (dy.dtype, x.dtype)
    if not set(kinds) <= set(FP8_DTYPES) or kinds == (torch.float8_e5m2, torch.float8_e5m2):
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
    if scale_inv.dtype != torch.float32 or scale_inv.numel() != 1 or scale_inv.device != device:
        raise ValueError(
            f"{name} is {scale_inv.dtype} {tuple(scale_inv.shape)} on {scale_inv.device}; wgrad needs one "
            f"FP32 element on {device}"
        )
    return scale_inv
