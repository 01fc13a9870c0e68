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
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

SHARED_LIMIT = 232_448
"""Bytes of shared memory that one program may have on sm_90."""


@dataclass(frozen=True)
class Compiled:
    """What ptxas says: per thread registers and spilled bytes, per program bytes of shared memory."""

    registers: int
    spilled: int
    shared: int
    ptx: str


def compile_for_hopper(
    module: str,
    kernel: str,
    signature: dict[str, str],
    constants: dict[str, Any],
    *,
    num_warps: int = 4,
    aligned: tuple[str, ...] = (),
    contract: bool = True,
) -> Compiled:
    """
    Args:
        module: such as "cast.scaling", in `flatfsdp.kernels`.
        signature: Triton type of each argument that is no constant, such as "*fp32", "i32", "*fp8e4nv".
        aligned: arguments that are multiples of 16, as pointers and sizes usually are; all pointers are.
        contract: whether a product and a sum may become one operation that rounds once.
    """
    return (
        _worker()
        .submit(_compile, module, kernel, signature, constants, num_warps, aligned, contract)
        .result()
    )


@cache
def _worker() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=_leave_the_interpreter)


def _leave_the_interpreter() -> None:
    os.environ.pop("TRITON_INTERPRET", None)


def _compile(
    module: str,
    kernel: str,
    signature: dict[str, str],
    constants: dict[str, Any],
    num_warps: int,
    aligned: tuple[str, ...],
    contract: bool,
) -> Compiled:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    function = getattr(importlib.import_module(f"flatfsdp.kernels.{module}"), kernel)
    order = list(function.arg_names)
    attributes = {
        (order.index(name),): [["tt.divisibility", 16]]
        for name, kind in signature.items()
        if kind.startswith("*") or name in aligned
    }
    types = {name: signature.get(name, "constexpr") for name in order}
    fixed = {(order.index(name),): value for name, value in constants.items()}
    make_source = GluonASTSource if function.is_gluon() else ASTSource
    source = make_source(function, types, fixed, attributes)
    options = {"num_warps": num_warps, "num_stages": 3, "enable_fp_fusion": contract}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    ptx = compiled.asm["ptx"]
    registers, spilled = _resources(ptx, contract)
    return Compiled(registers, spilled, compiled.metadata.shared, ptx)


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
