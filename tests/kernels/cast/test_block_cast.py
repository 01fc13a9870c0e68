"""Casts with block scales: scales and bytes bit for bit, in both layouts, with partial blocks."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor

from flatfsdp.kernels.cast import block_cast as module
from flatfsdp.kernels.cast.block_cast import (
    BLOCK,
    FLT_MAX,
    LARGEST,
    LOW_ROWS,
    LOW_WARPS,
    NUM_WARPS,
    BlockCast,
    block_cast,
    vector_warps,
)
from tests.support.kernels.compiling import DTYPE_OF, SHARED_LIMIT, Compiled, compile_for_hopper
from tests.support.kernels.fp8_pairs import endangered_pairs
from tests.support.kernels.running import DTYPES, E4M3, bits, check_operator, saturated

# numpy's, in the interpreter: a block of zeros has an infinite scale for a moment.
pytestmark = pytest.mark.filterwarnings("ignore:(divide by zero|overflow) encountered:RuntimeWarning")

REGISTERS = 65_536
"""Registers of a multiprocessor of sm_90."""
BLOCKS = pytest.mark.parametrize("block", ["1x128", "128x128"])
RUNS = {
    "1x128": {"reference": module.vectors_reference, "kernel": module.vectors_launch},
    "128x128": {"reference": module.squares_reference, "kernel": module.squares_launch},
}
WHO = pytest.mark.parametrize("who", ["reference", "kernel"])


def run(
    who: str,
    x: Tensor,
    block: str,
    monkeypatch: pytest.MonkeyPatch,
    rowwise: bool = True,
    columnwise: bool = True,
    **options: Any,
) -> BlockCast:
    """Calls the public function with the reference or with the kernel, on poisoned memory."""
    for name, kind in (("_cast_vectors", "1x128"), ("_cast_squares", "128x128")):
        monkeypatch.setattr(module, name, poisoned(RUNS[kind][who]))
    return block_cast(x, block=block, rowwise=rowwise, columnwise=columnwise, **options)


def poisoned(launch: Any) -> Any:
    def call(x: Tensor, *arguments: Any) -> None:
        for out in arguments[0:3:2]:
            if out is not None:
                out.view(torch.uint8).fill_(0x7F)
        launch(x, *arguments)

    return call


def block_maxima(x: Tensor, height: int) -> Tensor:
    """Largest magnitude of each block of `height` x 128, one by one."""
    rows, cols = math.ceil(x.shape[0] / height), math.ceil(x.shape[1] / BLOCK)
    maxima = torch.empty(rows, cols, dtype=torch.float64)
    for row in range(rows):
        for col in range(cols):
            part = x[row * height : (row + 1) * height, col * BLOCK : (col + 1) * BLOCK]
            maxima[row, col] = part.double().abs().max()
    return maxima


def spread(blocks: Tensor, height: int, shape: torch.Size) -> Tensor:
    """Expands each block's number to its elements."""
    row = torch.arange(shape[0]) // height
    col = torch.arange(shape[1]) // BLOCK
    return blocks[row][:, col]


def check_matrix(q: Tensor, scale_inv: Tensor, x: Tensor, height: int, power_of_two: bool) -> None:
    """Checks that q and its scales follow the formulas, computed in float64 on the CPU."""
    q, scale_inv, x = q.cpu(), scale_inv.cpu(), x.cpu()
    scale = 448 / block_maxima(x, height)
    if power_of_two:
        scale = torch.exp2(scale.log2().floor())
        assert torch.equal(scale_inv.double(), 1 / scale)
    else:
        scale = scale.float()  # the one rounding of the division
        assert torch.equal(scale_inv, 1 / scale)
    product = (x.double() * spread(scale.double(), height, x.shape)).float()
    assert torch.equal(bits(q), bits(saturated(product, E4M3)))


@WHO
@BLOCKS
@DTYPES
@pytest.mark.parametrize("shape", [(5, 16), (130, 200)])
@pytest.mark.parametrize("power_of_two", [True, False])
def test_scales_and_bytes_against_float64(
    who: str,
    block: str,
    dtype: torch.dtype,
    shape: tuple[int, int],
    power_of_two: bool,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = (torch.randn(shape, device=device) * torch.randn(shape, device=device).exp()).to(dtype)
    out = run(who, x, block, monkeypatch, power_of_two=power_of_two)
    height = 1 if block == "1x128" else BLOCK
    for q, scale_inv, matrix in (
        (out.rowwise, out.rowwise_scale_inv, x),
        (out.columnwise, out.columnwise_scale_inv, x.t()),
    ):
        used = scale_inv[:, : math.ceil(matrix.shape[1] / BLOCK)]
        check_matrix(q, used, matrix, height, power_of_two)
        assert q.is_contiguous() and q.shape == matrix.shape
    if block == "128x128":
        assert torch.equal(bits(out.rowwise).t(), bits(out.columnwise))


@WHO
@pytest.mark.parametrize(("shape", "padded"), [((130, 200), (4, 4)), ((520, 16), (4, 8))])
def test_layouts_of_scales(
    who: str, shape: tuple[int, int], padded: tuple[int, int], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layouts are those that cuBLASLt reads: adjacent rows, or blocks in padded rows."""
    x = torch.randn(shape, device=device)
    rows, cols = shape
    wide, high = math.ceil(cols / BLOCK), math.ceil(rows / BLOCK)
    vectors = run(who, x, "1x128", monkeypatch)
    assert (vectors.rowwise_scale_inv.shape, vectors.rowwise_scale_inv.stride()) == ((rows, wide), (1, rows))
    turned = vectors.columnwise_scale_inv
    assert (turned.shape, turned.stride()) == ((cols, high), (1, cols))
    squares = run(who, x, "128x128", monkeypatch)
    assert squares.rowwise_scale_inv.shape == (high, padded[0])
    assert squares.columnwise_scale_inv.shape == (wide, padded[1])
    for scale_inv, used in ((squares.rowwise_scale_inv, wide), (squares.columnwise_scale_inv, high)):
        assert scale_inv.is_contiguous() and (scale_inv[:, :used] > 0).all()
        assert (scale_inv[:, used:] == 0).all()


@BLOCKS
@pytest.mark.parametrize(("rowwise", "columnwise"), [(True, False), (False, True)])
def test_one_layout_alone_is_the_same(
    block: str, rowwise: bool, columnwise: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(70, 150, device=device).bfloat16()
    both = run("kernel", x, block, monkeypatch)
    for who in ("reference", "kernel"):
        one = run(who, x, block, monkeypatch, rowwise=rowwise, columnwise=columnwise)
        for found, expected, is_wanted in zip(one, both, [rowwise] * 2 + [columnwise] * 2, strict=True):
            assert (found is not None) == is_wanted
            assert found is None or torch.equal(bits(found), bits(expected))


@WHO
@BLOCKS
def test_special_values(who: str, block: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One block for each value; 16 rows, the first two of which are not zero."""
    blocks = {
        "zeros": ([0.0, -0.0], 1.0),
        "infinity": ([torch.inf, 3.0], 1.0),
        "nan": ([torch.nan, -3.0], 1.0),
        "tiny": ([2.0**-149, -(2.0**-130)], 2.0**127),
        "huge": ([-3e38, 1.0], 2.0**-120),
        "exact": ([448.0, -1.0], 1.0),
        "just above": ([math.nextafter(448.0, 512.0) + 2.0**-15, 1.0], 0.5),
        "ordinary": ([-1.75, 0.3], 256.0),
    }
    x = torch.zeros(1, BLOCK * len(blocks), device=device)
    for index, (values, _) in enumerate(blocks.values()):
        x[0, index * BLOCK] = values[0]
        x[0, index * BLOCK + 100] = values[1]
    out = run(who, x, block, monkeypatch)
    scales = torch.tensor([scale for _, scale in blocks.values()], dtype=torch.float64)
    assert torch.equal(out.rowwise_scale_inv[0].cpu().double(), 1 / scales)
    expected = x.cpu().double() * scales.repeat_interleave(BLOCK)
    assert torch.equal(bits(out.rowwise.cpu()), bits(saturated(expected.float(), E4M3)))
    finite = out.rowwise.float()
    assert finite[0, BLOCK] == 448, "infinity saturates"
    assert finite[0, 2 * BLOCK].isnan() and finite[0, 2 * BLOCK + 100] == -3, "NaN stays where it is"
    assert torch.signbit(finite[0, 100]), "-0.0"


@WHO
def test_powers_of_two_at_their_edges(who: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """448 is 1.75 * 2^8: exactly there the next smaller power begins."""
    edges = [1.75 * 2.0**exponent for exponent in range(-149, 128, 13)]
    largest = torch.tensor(edges)
    above, below = (torch.nextafter(largest, torch.tensor(limit)) for limit in (torch.inf, 0.0))
    amaxes = torch.cat([below, largest, above, torch.tensor([FLT_MAX, 2.0**-149])])
    x = torch.zeros(1, BLOCK * len(amaxes), device=device)
    x[0, ::BLOCK] = amaxes.to(device)
    found = run(who, x, "1x128", monkeypatch, columnwise=False).rowwise_scale_inv[0].cpu()
    exponents = [exponent_below(448 / Fraction(amax)) for amax in amaxes.tolist()]
    expected = [2.0 ** -min(127, exponent) for exponent in exponents]
    assert found.tolist() == expected


def exponent_below(ratio: Fraction) -> int:
    """Exponent of the largest power of two not above a positive number."""
    exponent = ratio.numerator.bit_length() - ratio.denominator.bit_length()
    return exponent if Fraction(2) ** exponent <= ratio else exponent - 1


@WHO
@BLOCKS
def test_epsilon_bounds_the_scale(who: str, block: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(4, 3 * BLOCK, device=device)
    x[:, BLOCK], x[:, 2 * BLOCK] = 1e-6, 7.0
    out = run(who, x, block, monkeypatch, epsilon=0.875)
    expected = torch.tensor([1 / 512, 1 / 512, 1 / 64], device=device)
    assert torch.equal(out.rowwise_scale_inv[:, :3], expected.expand_as(out.rowwise_scale_inv[:, :3]))


@BLOCKS
def test_no_rows(block: str, device: str) -> None:
    out = block_cast(torch.empty(0, 256, device=device), block=block, rowwise=True, columnwise=True)
    assert out.rowwise.shape == (0, 256) and out.columnwise.shape == (256, 0)


def test_what_does_not_fit_is_named(device: str) -> None:
    x = torch.randn(16, 128, device=device)
    with pytest.raises(ValueError, match="at least one layout"):
        block_cast(x, block="1x128", rowwise=False, columnwise=False)
    with pytest.raises(ValueError, match="block is '128x1'"):
        block_cast(x, block="128x1", rowwise=True, columnwise=False)
    with pytest.raises(ValueError, match=r"x is torch\.float32 of shape \(128, 16\)"):
        block_cast(x.t(), block="1x128", rowwise=True, columnwise=False)
    with pytest.raises(ValueError, match=r"x is torch\.float64"):
        block_cast(x.double(), block="1x128", rowwise=True, columnwise=False)


@BLOCKS
def test_operators(block: str) -> None:
    operator = {"1x128": "block_cast_vectors_", "128x128": "block_cast_squares_"}[block]
    x = torch.randn(16, 48)
    inv = torch.empty(1, 16) if block == "1x128" else torch.zeros(1, 4)
    check_operator(operator, x, x.to(E4M3), inv, None, None, True, 0.0)


def compiled(
    kernel: str, dtype: str, columnwise: bool = True, aligned: tuple[str, ...] = ("rows", "cols")
) -> tuple[Compiled, int]:
    """The kernel and the warps of a program, at the tile for both outputs, or for the rowwise one alone."""
    types = {"rowwise_ptr columnwise_ptr": "*fp8e4nv", "rowwise_inv_ptr columnwise_inv_ptr": "*fp32"}
    types |= {"x_ptr": f"*{dtype}", "rows cols epsilon_bits": "i32"}
    constants: dict[str, Any] = {"POWER_OF_TWO": True, "LARGEST": LARGEST, "FLT_MAX": FLT_MAX, "BLOCK": BLOCK}
    constants["WHOLE"] = "rows" in aligned
    if not columnwise:
        constants |= {"columnwise_ptr": None, "columnwise_inv_ptr": None}
    warps = NUM_WARPS
    if kernel == "_vectors_kernel":
        constants["PAIRS"] = (BLOCK if columnwise else LOW_ROWS) // 2
        warps = vector_warps(DTYPE_OF[dtype]) if columnwise else LOW_WARPS
    else:
        types["rowwise_inv_stride columnwise_inv_stride"] = "i32"
    options: dict[str, Any] = {"num_warps": warps, "aligned": aligned, "fits": len(aligned) == 2}
    return compile_for_hopper(f"cast.block_cast.{kernel}", types, constants, **options), warps


@pytest.mark.parametrize(
    ("kernel", "dtype", "programs"),
    [
        ("_vectors_kernel", "bf16", 3),
        ("_vectors_kernel", "fp32", 2),
        ("_squares_kernel", "bf16", 2),
        ("_squares_kernel", "fp32", 2),
    ],
)
def test_hopper_code(kernel: str, dtype: str, programs: int) -> None:
    """16 bytes per load and store, pairs transposed by the hardware, several programs per multiprocessor."""
    both, warps = compiled(kernel, dtype)
    assert programs * 32 * warps * both.registers <= REGISTERS
    assert programs * both.shared <= SHARED_LIMIT
    assert "ld.global.v4" in both.ptx and "st.global.v4" in both.ptx and "ldmatrix" in both.ptx
    assert "div.rn" not in both.ptx and "div.full" not in both.ptx, "powers of two need no division"
    assert not endangered_pairs(both.ptx)


def test_hopper_code_of_rows_alone() -> None:
    rows, _ = compiled("_vectors_kernel", "bf16", columnwise=False)
    assert rows.registers <= 48
    assert "ld.global.v4" in rows.ptx and "st.global.v4" in rows.ptx


@pytest.mark.parametrize("kernel", ["_vectors_kernel", "_squares_kernel"])
def test_odd_shapes_keep_their_values_in_ptxas(kernel: str) -> None:
    for aligned in ((), ("rows",), ("cols",)):
        assert not endangered_pairs(compiled(kernel, "bf16", aligned=aligned)[0].ptx), aligned
