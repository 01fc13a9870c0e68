"""What is checked of each optimizer's kernel once it is compiled for Hopper."""

from __future__ import annotations

from typing import Any

import torch

from flatfsdp.kernels.shared.tiles import find
from tests.support.kernels.compiling import compile_for_hopper


def check_compiled(name: str, constants: dict[str, Any], *, always: bool, read: int, written: int) -> None:
    """Compiles a kernel: no spills, no contracted operations, and loads and stores of 16 bytes.

    Args:
        name: the kernel's in the table of tiles.
        constants: its constexprs but N_POW2, BLOCK and ALIGNED.
        always: whether the step is taken whatever the gradients are.
        read, written: how many FP32 tensors are.
    """
    tile = find(name, torch.float32, 1)
    signature = {"table_ptr": "*i64", "n": "i32", "grad_scale_ptr taken_ptr": "*fp32"}
    fixed = {**constants, "N_POW2": 512, "ALIGNED": True, **({"taken_ptr": None} if always else {})}
    compiled = compile_for_hopper(f"optim.{name}._{name}_kernel", signature, fixed, tile=tile, contract=False)
    assert "fma.rn" not in compiled.ptx
    assert compiled.count("ld.global.v4.b32") == read * compiled.elements // 4
    assert compiled.count("st.global.v4.b32") == written * compiled.elements // 4
