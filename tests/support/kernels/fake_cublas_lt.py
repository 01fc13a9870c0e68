"""cuBLASLt as far as products call it, in PyTorch on the CPU, and what it was told."""

from __future__ import annotations

import ctypes
from collections import Counter
from enum import IntEnum
from itertools import count
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


class FakeCublasLt:
    """Stands for nvmath.bindings.cublasLt in what a plan calls: same arguments, on CPU memory.

    Args:
        first_choice: whether an algorithm is found if only those without split-K are asked for.
        others: splits, reduction scheme and tile of each of those found if any kind is asked for.
    """

    MatmulDescAttribute = IntEnum(
        "MatmulDescAttribute",
        "TRANSA TRANSB FAST_ACCUM A_SCALE_POINTER B_SCALE_POINTER EPILOGUE BIAS_POINTER",
    )
    Epilogue = IntEnum("Epilogue", {"DEFAULT": 1, "BIAS": 4})
    MatmulPreferenceAttribute = IntEnum(
        "MatmulPreferenceAttribute",
        "MAX_WORKSPACE_BYTES REDUCTION_SCHEME_MASK MIN_ALIGNMENT_A_BYTES MIN_ALIGNMENT_B_BYTES "
        "MIN_ALIGNMENT_C_BYTES MIN_ALIGNMENT_D_BYTES",
    )
    MatmulAlgoConfigAttribute = IntEnum("MatmulAlgoConfigAttribute", "SPLITK_NUM REDUCTION_SCHEME TILE_ID")
    MatmulTile = IntEnum("MatmulTile", {"TILE_128x128": 20, "TILE_128x160": 29, "TILE_168x128": 30})
    ReductionScheme = IntEnum("ReductionScheme", {"NONE": 0, "COMPUTE_TYPE": 2, "MASK": 7})
    SIZES = SimpleNamespace(
        desc={
            **{"TRANSA": 4, "TRANSB": 4, "FAST_ACCUM": 1, "EPILOGUE": 4},
            **{"A_SCALE_POINTER": 8, "B_SCALE_POINTER": 8, "BIAS_POINTER": 8},
        },
        preference={"MAX_WORKSPACE_BYTES": 8, "REDUCTION_SCHEME_MASK": 4},
    )
    DTYPES = {  # noqa: RUF012
        0: torch.float32, 2: torch.float16, 14: torch.bfloat16, 28: E4M3, 29: E5M2
    }  # fmt: skip

    class cuBLASLtError(Exception):  # noqa: N801
        pass

    def __init__(self, first_choice: bool = True, others: tuple[tuple[int, ...], ...] = ()) -> None:
        self.calls: Counter[str] = Counter()
        self.things: dict[int, Any] = {}
        self._numbers = count(1)
        self.algorithms_run: list[int] = []
        self.betas: list[float] = []
        self.first_choice, self.others = first_choice, others

    def _new(self, thing: Any) -> int:
        number = next(self._numbers)
        self.things[number] = thing
        return number

    def get_version(self) -> int:
        return 130000

    def create(self) -> int:
        self.calls["create"] += 1
        return self._new("handle")

    def matrix_layout_create(self, kind: int, rows: int, cols: int, ld: int) -> int:
        return self._new((self.DTYPES[kind], rows, cols, ld))

    def matmul_desc_create(self, compute_type: int, scale_type: int) -> int:
        assert (compute_type, scale_type) == (68, 0)
        return self._new({})

    def matmul_desc_set_attribute(self, desc: int, name: int, address: int, size: int) -> None:
        name = self.MatmulDescAttribute(name).name
        assert size == self.SIZES.desc[name]
        self.things[desc][name] = int.from_bytes(ctypes.string_at(address, size), "little")

    def matmul_desc_destroy(self, desc: int) -> None:
        del self.things[desc]

    def matrix_layout_destroy(self, layout: int) -> None:
        del self.things[layout]

    def matmul_preference_create(self) -> int:
        return self._new({})

    def matmul_preference_set_attribute(self, preference: int, name: int, address: int, size: int) -> None:
        name = self.MatmulPreferenceAttribute(name).name
        assert size == self.SIZES.preference.get(name, 4)
        self.things[preference][name] = int.from_bytes(ctypes.string_at(address, size), "little")

    def matmul_preference_destroy(self, preference: int) -> None:
        self.calls["preferences destroyed"] += 1

    def MatmulHeuristicResult(self, size: int) -> Any:  # noqa: N802
        found = [self._new(("algorithm", None)) for _ in range(size)]
        results = Results(SimpleNamespace(ptr=pointer, state=0, workspace_size=64) for pointer in found)
        results.ptr = results[0].ptr
        return results

    def matmul_algo_get_heuristic(self, *args: int) -> None:
        _handle, desc, a, _b, c, d, preference, wanted, results, how_many = args
        self.calls["heuristic"] += 1
        wished = dict(self.things[preference])
        mask = wished.pop("REDUCTION_SCHEME_MASK")
        assert wished.pop("MAX_WORKSPACE_BYTES") == 32 << 20 and mask in (0, 7)
        assert len(wished) == 4 and set(wished.values()) == {16}, "one algorithm for every buffer"
        told, is_fp8 = self.things[desc], self.things[a][0].itemsize == 1
        assert ("A_SCALE_POINTER" in told) == ("B_SCALE_POINTER" in told) == ("FAST_ACCUM" in told) == is_fp8
        assert c == d
        first = ((1, 0, 0),) * self.first_choice
        found = (self.others or first) if mask else first
        if not found:
            raise self.cuBLASLtError("NOT_SUPPORTED")
        for index, configuration in enumerate(found[:wanted]):
            self.things[results + index] = ("algorithm", configuration)
        ctypes.c_int32.from_address(how_many).value = len(found[:wanted])

    def matmul_algo_config_get_attribute(
        self, algorithm: int, name: int, address: int, size: int, written: int
    ) -> None:
        assert size == 4 and written
        ctypes.c_int32.from_address(address).value = self.things[algorithm][1][name - 1]

    def _matrix(self, address: int, layout: int) -> Tensor:
        dtype, rows, cols, ld = self.things[layout]
        size = torch.empty((), dtype=dtype).element_size() * ld * cols
        memory = torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=torch.uint8)
        return memory.view(dtype).view(cols, ld)[:, :rows].t()

    def _vector(self, address: int, layout: int) -> Tensor:
        """A vector as long as a column of that matrix, and of its dtype."""
        dtype, rows, _cols, _ld = self.things[layout]
        memory = (ctypes.c_uint8 * (dtype.itemsize * rows)).from_address(address)
        return torch.frombuffer(memory, dtype=dtype).float()

    def matmul(self, handle: int, desc: int, alpha: int, *args: int) -> None:
        a, a_layout, b, b_layout, beta, c, c_layout, d, d_layout, algorithm, workspace, size, stream = args
        told = self.things[desc]
        assert not (a % 16 or b % 16 or c % 16 or d % 16)
        left, right = self._matrix(a, a_layout).float(), self._matrix(b, b_layout).float()
        left = left.t() if told["TRANSA"] else left
        right = right.t() if told["TRANSB"] else right
        product = left @ right * ctypes.c_float.from_address(alpha).value
        for name in ("A_SCALE_POINTER", "B_SCALE_POINTER"):
            if name in told:
                product *= ctypes.c_float.from_address(told[name]).value
        if told.get("EPILOGUE") == self.Epilogue.BIAS:
            product += self._vector(told["BIAS_POINTER"], d_layout)[:, None]
        kept = ctypes.c_float.from_address(beta).value
        if kept:
            product += kept * self._matrix(c, c_layout)
        self._matrix(d, d_layout).copy_(product)
        self.algorithms_run.append(algorithm)
        self.betas.append(kept)
        assert self.things[handle] == "handle" and workspace and size == 64 and stream == 7


class Results(list):  # type: ignore[type-arg]
    """Results of a heuristic: an array of structures, with an address."""

    ptr: int
