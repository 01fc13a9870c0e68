"""Transposes of FP8 bytes, of one matrix and of many."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flatfsdp.kernels.cast import transpose as module
from flatfsdp.kernels.cast.transpose import transpose, transpose_many
from flatfsdp.kernels.shared.tiles import find
from tests.support.assertions import assert_raises
from tests.support.kernels.compiling import compile_for_hopper
from tests.support.kernels.running import E4M3, E5M2, bits, check_operator


@pytest.mark.parametrize("shape", [(1, 16), (123, 48), (129, 1000), (144, 272)])
@pytest.mark.parametrize("run", [module.transpose_reference, module.transpose_launch])
def test_transpose_moves_every_byte(run: Any, shape: tuple[int, int], device: str) -> None:
    q = torch.randint(0, 256, shape, dtype=torch.uint8, device=device).view(E4M3)
    out = torch.full((shape[1], shape[0]), 85, dtype=torch.uint8, device=device).view(E4M3)
    run(q, out)
    assert torch.equal(bits(out), bits(q).t())


@pytest.mark.parametrize(
    "shapes", [[(16, 272), (144, 32), (128, 128)], [(3, 5), (144, 272), (129, 16)]], ids=["whole", "odd"]
)
@pytest.mark.parametrize("run", [module.transpose_many_reference, module.transpose_many_launch])
def test_transpose_many_moves_every_byte(run: Any, shapes: list[tuple[int, int]], device: str) -> None:
    sources = [torch.randint(0, 256, s, dtype=torch.uint8, device=device).view(E5M2) for s in shapes]
    flat = torch.full((sum(q.numel() for q in sources) + 16,), 85, dtype=torch.uint8, device=device)
    pieces = flat[:-16].split([q.numel() for q in sources])
    targets = [piece.view(q.shape[::-1]).view(E5M2) for piece, q in zip(pieces, sources, strict=True)]
    run(sources[0], sources, targets)
    for q, out in zip(sources, targets, strict=True):
        assert torch.equal(bits(out), bits(q).t())
    assert (flat[-16:] == 85).all()


def test_public_transposes() -> None:
    q = torch.randn(20, 7).to(E5M2)
    assert torch.equal(bits(transpose(q)), bits(q).t()) and transpose(q).is_contiguous()
    out = torch.empty(7, 20, dtype=E5M2)
    transpose_many([(q, out)])
    assert torch.equal(bits(out), bits(q).t())
    transpose_many([])


def test_what_does_not_fit_is_named() -> None:
    x = torch.randn(4, 6)
    assert_raises(ValueError, r"q is torch\.float32", transpose, x)
    q = x.to(E4M3)
    with pytest.raises(ValueError, match=r"pairs\[1\]\[0\] .* with strides \(1, 6\)"):
        transpose_many([(q, transpose(q)), (q.t(), q)])
    assert_raises(ValueError, r"pairs\[0\] is torch\.float8_e4m3fn \(4, 6\)", transpose_many, [(q, q)])
    assert_raises(ValueError, "one dtype", transpose_many, [(q, torch.empty(6, 4, dtype=E5M2))])


def test_compiled_and_faked_calls_go_through_the_operators() -> None:
    q, q_t = (torch.randn(shape).to(E4M3) for shape in ((4, 6), (6, 4)))
    check_operator("transpose_", q, q_t)
    check_operator("transpose_many_", q, [q], [q_t])


@pytest.mark.parametrize(
    ("kernel", "types", "constants"),
    [
        ("_transpose_kernel", {"q_ptr out_ptr": "*u8", "rows cols": "i32"}, {}),
        ("_transpose_many_kernel", {"table_ptr": "*i64", "n": "i32"}, {"N_POW2": 16}),
    ],
)
def test_transposes_compile_for_hopper_without_spills(kernel: str, types: Any, constants: Any) -> None:
    tile, constants = find("transpose", E4M3, 4096), {"WHOLE": True, **constants}
    compiled = compile_for_hopper(
        f"cast.transpose.{kernel}", types, constants, tile=tile, aligned=["rows", "cols"]
    )
    accesses = compiled.elements // 16
    assert compiled.registers <= 64
    assert compiled.count("ld.global.v4.b32") == compiled.count("st.global.v4.b32") == accesses
    assert "ldmatrix" in compiled.ptx, "single bytes from shared memory would be the bottleneck"
