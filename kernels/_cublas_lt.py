"""cuBLASLt as weight gradients use it: one GEMM that adds to FP32 in place, by one algorithm a shape.

In:   device, sizes and dtypes of a weight gradient.
Out:  a `Plan`, or None: without nvmath-python, or without an algorithm that runs in place.
Next: `wgrad.py` runs it.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import threading
from functools import cache
from typing import Any

import torch
from flatfsdp.kernels._outputs import FP8_DTYPES
from flatfsdp.kernels.accumulate import accumulate
from flatfsdp.kernels.gemm import ALIGNMENT
from torch import Tensor

_log = logging.getLogger(__name__)

MAX_WORKSPACE = 32 << 20
MAX_CANDIDATES = 64
"""Algorithms that cuBLASLt is asked for where its first choice without split-K will not do."""


@cache
def bindings() -> Any:
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
    return bindings().create()


@cache
def plan_of(
    device: torch.device,
    shape: tuple[int, int, int],
    dy_dtype: torch.dtype,
    x_dtype: torch.dtype,
    split_accumulator: bool,
) -> Plan | None:
    """The one plan of this GEMM, or None if it does not run in place; `shape` is out, in, tokens."""
    # FP32 is left to torch.mm, which knows whether TF32 is allowed.
    if dy_dtype == torch.float32 or 0 in shape or bindings() is None:
        return None
    plan = Plan(device, shape, dy_dtype, x_dtype, split_accumulator)
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


class Plan:
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
        lt = self._lt = bindings()
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
        """dy and x: contiguous, at multiples of `ALIGNMENT`; `scale_invs`: theirs, in this order, in FP8."""
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
