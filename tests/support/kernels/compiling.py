"""Compiles kernels for Hopper on a machine without a GPU, and says what they need.

The process that runs the tests defines kernels for the interpreter, so a process beside it compiles.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import re
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    # The worker imports this file before it has left the interpreter, and must not define kernels then.
    from flatfsdp.kernels.shared.tiles import Tile

SHARED_LIMIT = 232_448
"""Bytes of shared memory that one program may have on sm_90."""
DTYPE_OF = {"bf16": torch.bfloat16, "fp32": torch.float32}
VECTOR = {name: 16 // dtype.itemsize for name, dtype in DTYPE_OF.items()}
"""Number of elements in 16 bytes."""
X_TYPES = pytest.mark.parametrize("x_type", DTYPE_OF)


@dataclass(frozen=True)
class Compiled:
    """What ptxas says of a kernel that fits into registers and shared memory.

    Attributes:
        registers: per thread.
        shared: bytes per program.
        elements: of the tile, per thread.
    """

    registers: int
    shared: int
    ptx: str
    elements: int = 0

    def count(self, instruction: str) -> int:
        return self.ptx.count(instruction)


def compile_for_hopper(
    kernel: str,
    signature: dict[str, str],
    constants: dict[str, Any],
    *,
    tile: Tile | None = None,
    num_warps: int = 4,
    aligned: Sequence[str] = (),
    contract: bool = True,
    fits: bool = True,
) -> Compiled:
    """Compiles a kernel, and checks that registers and shared memory suffice.

    Args:
        kernel: such as "cast.scaling._update_kernel", in `flatfsdp.kernels`.
        signature: Triton types of arguments, such as {"scale_ptr amax_ptr": "*fp32", "rows cols": "i32"};
            those that the kernel does not have are left out.
        constants: by name; arguments among them are none in the compiled kernel.
        tile: gives the warps, and those of BLOCK_ROWS, BLOCK_COLS, BLOCK, PAIRS, STAGES and STEPS that the
            kernel has and `constants` has not.
        aligned: arguments that are multiples of 16, as pointers and sizes usually are; all pointers are.
        contract: whether a product and a sum may become one operation that rounds once.
        fits: whether it has to fit into registers.
    """
    types = {name: kind for names, kind in signature.items() for name in names.split()}
    sizes, elements = {}, 0
    if tile is not None:
        num_warps, elements = tile.warps, tile.rows * tile.cols // (32 * tile.warps)
        sizes = {
            "BLOCK_ROWS": tile.rows,
            "PAIRS": tile.rows // 2,
            "BLOCK_COLS": tile.cols,
            "BLOCK": tile.cols,
        }
        sizes |= {"STAGES": tile.stages, "STEPS": tile.steps}
    arguments = (kernel, types, sizes, constants, num_warps, aligned, contract)
    ptx, shared = _worker().submit(_compile, *arguments).result()
    registers, spilled = _resources(ptx, contract)
    assert (spilled == 0 or not fits) and shared <= SHARED_LIMIT
    return Compiled(registers, shared, ptx, elements)


@cache
def _worker() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=_leave_the_interpreter)


def _leave_the_interpreter() -> None:
    os.environ.pop("TRITON_INTERPRET", None)


def _compile(
    kernel: str,
    types: dict[str, str],
    sizes: dict[str, int],
    constants: dict[str, Any],
    num_warps: int,
    aligned: Sequence[str],
    contract: bool,
) -> tuple[str, int]:
    """PTX, and bytes of shared memory."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    module, _, name = kernel.rpartition(".")
    function = getattr(importlib.import_module(f"flatfsdp.kernels.{module}"), name)
    order = list(function.arg_names)
    constants = {**{name: size for name, size in sizes.items() if name in order}, **constants}
    types = {name: kind for name, kind in types.items() if name in order and name not in constants}
    attributes = {
        (order.index(name),): [["tt.divisibility", 16]]
        for name, kind in types.items()
        if kind.startswith("*") or name in aligned
    }
    of_all = {name: types.get(name, "constexpr") for name in order}
    fixed = {(order.index(name),): value for name, value in constants.items()}
    make_source = GluonASTSource if function.is_gluon() else ASTSource
    source = make_source(function, of_all, fixed, attributes)
    options = {"num_warps": num_warps, "num_stages": 3, "enable_fp_fusion": contract}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    return compiled.asm["ptx"], compiled.metadata.shared


def _resources(ptx: str, contract: bool) -> tuple[int, int]:
    import triton

    ptxas = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        options = ["-v", "-arch=sm_90a", f"--fmad={str(contract).lower()}"]
        command = [str(ptxas), *options, str(source), "-o", os.devnull]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers = max(int(n) for n in re.findall(r"Used (\d+) registers", report))
    spilled = sum(int(n) for n in re.findall(r"(\d+) bytes spill", report))
    return registers, spilled
