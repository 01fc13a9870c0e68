"""cuBLASLt through nvmath-python: one algorithm for each GEMM, chosen once and kept.

In:   device, sizes and dtypes of a GEMM, as a `Product`.
Out:  a `PreparedMatmul`; None without nvmath-python, or without an algorithm.
Next: `gemm.py` and `wgrad.py` run it, or else PyTorch's own GEMM.

PyTorch asks cuBLASLt for an algorithm in every call, which takes half of its host time, and uses the first
choice, which on an H200 is not always the fastest: `tiles.py` lists faster ones.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import threading
import weakref
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flatfsdp.kernels.gemm.tiles import preferred_tile
from flatfsdp.kernels.shared.outputs import FP8_DTYPES

_log = logging.getLogger(__name__)

ADDRESS_ALIGNMENT = 16
"""Addresses of all matrices, and lengths of their rows, are multiples of this number of bytes."""
MAX_WORKSPACE = 32 << 20
"""Bytes of temporary memory that an algorithm may use."""
MAX_CANDIDATES = 64
"""Number of algorithms to request from cuBLASLt if its first choice does not fit."""


class Product(NamedTuple):
    """A GEMM: out [rows, cols] = a b, or out += a b, summed over `inner`.

    Attributes:
        a_along, b_along: whether the operand is contiguous along the sum: `a` is [rows, inner] and `b` is
            [cols, inner]; otherwise they are [inner, rows] and [inner, cols].  FP8 needs both.
        split_accumulator: FP8 only: partial sums are promoted to FP32 registers at intervals.
        has_bias: whether a vector [cols] in `out_dtype` is added to the FP32 sums and rounded with them.
        sums_once: whether split-K is forbidden, so that one FP32 sum of each element is written or added once
            to `out`; for weight gradients.
    """

    rows: int
    cols: int
    inner: int
    a_dtype: torch.dtype
    b_dtype: torch.dtype
    out_dtype: torch.dtype
    a_along: bool = True
    b_along: bool = True
    split_accumulator: bool = False
    has_bias: bool = False
    sums_once: bool = False

    @property
    def is_fp8(self) -> bool:
        """Whether the operands are in FP8."""
        return self.a_dtype in FP8_DTYPES


@cache
def bindings() -> Any:
    """The nvmath module of cuBLASLt's functions, or None without nvmath-python; logs once which it is."""
    try:
        cublas_lt = importlib.import_module("nvmath.bindings.cublasLt")
    except ImportError as error:
        _log.info(
            "Weight gradients: a GEMM into an FP32 temporary, then an add; nvmath-python would let the GEMM "
            "accumulate in place, and choose faster FP8 GEMMs (%s)",
            error,
        )
        return None
    _log.info(
        "Weight gradients and FP8 GEMMs: cuBLASLt %d through nvmath-python, accumulating in place",
        cublas_lt.get_version(),
    )
    return cublas_lt


# Values of cudaDataType_t, cublasComputeType_t and cublasOperation_t in CUDA's headers.
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
    """The cuBLASLt context on the current device, `device`; kept until the process ends."""
    return bindings().create()


@lru_cache(maxsize=4096)
def prepared_matmul(device: torch.device, product: Product) -> PreparedMatmul | None:
    """The `PreparedMatmul` of this GEMM, made once; None if cuBLASLt cannot run it."""
    # FP32 is left to PyTorch, which knows whether TF32 is allowed.
    if product.a_dtype == torch.float32 or 0 in product[:3] or bindings() is None:
        return None
    matmul = PreparedMatmul(device, product)
    if matmul.is_possible:
        return matmul
    _log.info("%s: cuBLASLt has no algorithm%s", product, " without split-K" * product.sums_once)
    return None


def are_readable(*operands: Tensor) -> bool:
    """Whether cuBLASLt can read these matrices, or biases, in place."""
    for operand in operands:
        if operand.data_ptr() % ADDRESS_ALIGNMENT or not operand.is_contiguous():
            return False
    return True


class PreparedMatmul:
    """One GEMM on one device: descriptors, layouts and the algorithm, made once and run many times.

    cuBLASLt is column-major, so it computes the transpose, [cols, rows] = B^T A: its first operand is `b` and
    its second one `a`.

    Attributes:
        is_possible: whether there is an algorithm to run.
    """

    def __init__(self, device: torch.device, product: Product) -> None:
        lt = self._lt = bindings()
        self._device = device
        self._handle = _handle(device)
        rows, cols, inner = product[:3]
        self._a_layout = self._layout(product.a_dtype, *((inner, rows) if product.a_along else (rows, inner)))
        self._b_layout = self._layout(product.b_dtype, *((inner, cols) if product.b_along else (cols, inner)))
        self._out_layout = self._layout(product.out_dtype, cols, rows)
        self._operation = lt.matmul_desc_create(_COMPUTE_32F, _CUDA_TYPES[torch.float32])
        self._lock = threading.Lock()
        names = lt.MatmulDescAttribute
        self._describe(names.TRANSA, ctypes.c_int32(_TRANSPOSED if product.b_along else _NOT_TRANSPOSED))
        self._describe(names.TRANSB, ctypes.c_int32(_NOT_TRANSPOSED if product.a_along else _TRANSPOSED))
        pointers = []
        if product.is_fp8:
            self._describe(names.FAST_ACCUM, ctypes.c_int8(not product.split_accumulator))
            pointers += [names.A_SCALE_POINTER, names.B_SCALE_POINTER]
        if product.has_bias:
            self._describe(names.EPILOGUE, ctypes.c_int32(lt.Epilogue.BIAS))
            pointers += [names.BIAS_POINTER]
        # Addresses of scales and bias, in memory that stays: a call has a budget of 20 microseconds on the
        # host.
        self._addresses = (ctypes.c_int64 * len(pointers))()
        self._pointers = [
            (int(name), ctypes.addressof(self._addresses) + index * ctypes.sizeof(ctypes.c_int64))
            for index, name in enumerate(pointers)
        ]
        # The choice may depend on whether there are scales and on a bias's alignment, not on their values.
        something = torch.ones(cols if product.has_bias else 1, device=device)
        self._point_at([something.data_ptr()] * len(pointers))
        self._algorithm = self._choose_algorithm(product)
        self.is_possible = self._algorithm is not None
        if self.is_possible:
            # Read once, because these are computed properties; a heuristic's result begins with the
            # algorithm.
            self._algorithm_address = self._algorithm.ptr
            self._workspace_size = self._algorithm.workspace_size
        layouts = (self._a_layout, self._b_layout, self._out_layout)
        weakref.finalize(self, _destroy, lt, self._operation, layouts).atexit = False

    def _layout(self, dtype: torch.dtype, rows: int, cols: int) -> int:
        """Make the layout of a column-major matrix [rows, cols] without gaps."""
        return self._lt.matrix_layout_create(_CUDA_TYPES[dtype], rows, cols, rows)

    def _describe(self, name: int, value: Any) -> None:
        """Set an attribute of the descriptor."""
        self._lt.matmul_desc_set_attribute(
            self._operation, name, ctypes.addressof(value), ctypes.sizeof(value)
        )

    def _point_at(self, addresses: list[Any]) -> None:
        """Set the addresses of scales and bias."""
        self._addresses[:] = addresses
        for name, address in self._pointers:
            self._lt.matmul_desc_set_attribute(self._operation, name, address, 8)

    def _choose_algorithm(self, product: Product) -> Any:
        """Choose the algorithm for any beta and any buffer; None if cuBLASLt has none.

        It has the preferred tile, or else is cuBLASLt's first choice.  For few outputs and a long sum,
        cuBLASLt may find no algorithm without split-K when asked for those alone, and yet list some among
        many of all kinds.
        """
        lt = self._lt
        tile = preferred_tile(product)
        if tile is not None:
            for found in self._heuristics(lt.ReductionScheme.MASK, MAX_CANDIDATES):
                if self._tile(found) == getattr(lt.MatmulTile, tile, None) and self._sums_once(found):
                    return found
        schemes = lt.ReductionScheme.NONE if product.sums_once else lt.ReductionScheme.MASK
        for found in self._heuristics(schemes, 1):
            return found
        for found in self._heuristics(lt.ReductionScheme.MASK, MAX_CANDIDATES):
            if self._sums_once(found):
                return found
        return None

    def offered_tiles(self) -> list[str]:
        """Tiles of the algorithms without split-K, best first by cuBLASLt's estimate."""
        found = self._heuristics(self._lt.ReductionScheme.MASK, MAX_CANDIDATES)
        tiles = dict.fromkeys(self._tile(one) for one in found if self._sums_once(one))
        return [self._lt.MatmulTile(tile).name for tile in tiles]

    def _tile(self, found: Any) -> int:
        """The tile of an algorithm, by its number in cuBLASLt."""
        return self._configured(found, self._lt.MatmulAlgoConfigAttribute.TILE_ID)

    def _heuristics(self, reduction_schemes: int, wanted: int) -> list[Any]:
        """Algorithms that cuBLASLt recommends, best first.

        Alignments are the smallest that are allowed instead of those of the first call's buffers.
        """
        lt = self._lt
        names = lt.MatmulPreferenceAttribute
        preference = lt.matmul_preference_create()
        for name, value in (
            (names.MAX_WORKSPACE_BYTES, ctypes.c_uint64(MAX_WORKSPACE)),
            (names.REDUCTION_SCHEME_MASK, ctypes.c_uint32(reduction_schemes)),
            (names.MIN_ALIGNMENT_A_BYTES, ctypes.c_uint32(ADDRESS_ALIGNMENT)),
            (names.MIN_ALIGNMENT_B_BYTES, ctypes.c_uint32(ADDRESS_ALIGNMENT)),
            (names.MIN_ALIGNMENT_C_BYTES, ctypes.c_uint32(ADDRESS_ALIGNMENT)),
            (names.MIN_ALIGNMENT_D_BYTES, ctypes.c_uint32(ADDRESS_ALIGNMENT)),
        ):
            lt.matmul_preference_set_attribute(
                preference, name, ctypes.addressof(value), ctypes.sizeof(value)
            )
        results, count = lt.MatmulHeuristicResult(wanted), ctypes.c_int32(0)
        try:
            lt.matmul_algo_get_heuristic(
                self._handle,
                self._operation,
                self._b_layout,
                self._a_layout,
                self._out_layout,
                self._out_layout,
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
        """An attribute of an algorithm."""
        value, written = ctypes.c_int32(0), ctypes.c_size_t(0)
        self._lt.matmul_algo_config_get_attribute(
            found.ptr, name, ctypes.addressof(value), ctypes.sizeof(value), ctypes.addressof(written)
        )
        return value.value

    def run(
        self,
        out: Tensor,
        a: Tensor,
        b: Tensor,
        scale_invs: tuple[Tensor, Tensor] | None = None,
        bias: Tensor | None = None,
        *,
        adds: bool = False,
    ) -> None:
        """Write or add to `out`.

        Args:
            out: contiguous, at a multiple of `ADDRESS_ALIGNMENT`, like all operands.
            a: first operand.
            b: second operand.
            scale_invs: factors of `a` and `b`, in FP8.
            bias: [cols] in `out_dtype`, with `has_bias`.
            adds: add to `out`; otherwise `out` is not read.
        """
        size = self._workspace_size
        # Allocated in each call: the allocator tracks what each stream still uses, and this runs on any
        # stream.
        workspace = out.new_empty(size, dtype=torch.uint8) if size else None
        pointed_at = [] if scale_invs is None else [scale_invs[1].data_ptr(), scale_invs[0].data_ptr()]
        if bias is not None:
            pointed_at.append(bias.data_ptr())
        # Addresses are part of the descriptor, and backwards run on several threads.
        with self._lock:
            if pointed_at:
                self._point_at(pointed_at)
            self._lt.matmul(
                self._handle,
                self._operation,
                _ADDRESS_OF_ONE,
                b.data_ptr(),
                self._b_layout,
                a.data_ptr(),
                self._a_layout,
                _ADDRESS_OF_ONE if adds else _ADDRESS_OF_ZERO,
                out.data_ptr(),
                self._out_layout,
                out.data_ptr(),
                self._out_layout,
                self._algorithm_address,
                0 if workspace is None else workspace.data_ptr(),
                size,
                torch._C._cuda_getCurrentRawStream(self._device.index),
            )


def _destroy(lt: Any, operation: int, layouts: tuple[int, ...]) -> None:
    """Free the descriptors of a garbage-collected GEMM; work that it started does not need them."""
    lt.matmul_desc_destroy(operation)
    for layout in layouts:
        lt.matrix_layout_destroy(layout)
