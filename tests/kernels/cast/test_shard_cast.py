"""Casts of many shards to FP8 and their amaxes, against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton.language as tl
from torch import Tensor

from flatfsdp.kernels.cast import shard_cast as module
from flatfsdp.kernels.cast.shard_cast import cast_many, max_abs_many
from flatfsdp.kernels.shared.tiles import find
from tests.support.assertions import assert_raises
from tests.support.gpu.waiting import without_synchronisation
from tests.support.kernels.compiling import Compiled, compile_for_hopper
from tests.support.kernels.fp8_pairs import endangered_pairs
from tests.support.kernels.running import E4M3, E5M2, FORMATS, bits, both, check_operator, saturated

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
MAX_ABS = both(module.max_abs_reference, module.max_abs_launch)
CAST = both(module.cast_reference, module.cast_launch)
THROUGH = pytest.mark.parametrize("through", [BF16, FP16, FP32])
ROUNDINGS = pytest.mark.parametrize(
    ("source_dtype", "through"), [(FP32, BF16), (FP32, FP16), (FP32, FP32), (BF16, BF16), (FP16, BF16)]
)
GAPS = pytest.mark.parametrize("gap", [16, 1], ids=["aligned", "unaligned"])
BLOCK = find("cast_many", FP32, 1).cols
NUMELS = [0, 5, 16, 0, 0, 123, 4097, 1, BLOCK, 2 * BLOCK + 48, 0]
POISON = 0x55


def slices(flat: Tensor, numels: list[int], gap: int) -> list[Tensor]:
    """Views of `flat` that start at multiples of `gap`."""
    views, start = [], 0
    for numel in numels:
        views.append(flat[start : start + numel])
        start += -(-numel // gap) * gap
    return views


def flat_size(numels: list[int]) -> int:
    return sum(-(-numel // 16) * 16 for numel in numels)


def random_slices(numels: list[int], dtype: torch.dtype, gap: int, device: str) -> list[Tensor]:
    """Slices of one flat buffer, each of another magnitude."""
    views = slices(torch.randn(flat_size(numels), device=device).to(dtype), numels, gap)
    for index, view in enumerate(views):
        view.mul_(2.0 ** (index - 5))
    return views


def poisoned_slices(
    numels: list[int], dtype: torch.dtype, gap: int, device: str
) -> tuple[Tensor, list[Tensor]]:
    """A flat buffer, and slices of it."""
    flat = torch.full((flat_size(numels),), POISON, dtype=torch.uint8, device=device).view(dtype)
    return flat, slices(flat, numels, gap)


def random_scales(n: int, device: str) -> Tensor:
    return torch.randn(n, device=device).exp() * 30


@MAX_ABS
@ROUNDINGS
@GAPS
def test_max_abs_is_exact(
    run: Any, source_dtype: torch.dtype, through: torch.dtype, gap: int, device: str
) -> None:
    tensors = random_slices(NUMELS, source_dtype, gap, device)
    amax = torch.zeros(len(NUMELS), device=device)
    run(amax, tensors, through)
    for tensor, ours in zip(tensors, amax.tolist(), strict=True):
        exact = tensor.to(through).double().abs().max().item() if tensor.numel() else 0.0
        assert ours == exact


@MAX_ABS
def test_the_amax_is_a_running_maximum(run: Any, device: str) -> None:
    tensors = [torch.tensor([value, -value / 2], device=device) for value in (0.5, 7.0, -9.0)]
    amax = torch.tensor([2.0, 2.0, torch.inf], device=device)
    run(amax, tensors, FP32)
    assert amax.tolist() == [2.0, 7.0, torch.inf]


@MAX_ABS
@THROUGH
def test_nan_wins_the_amax_of_its_tensor_only(run: Any, through: torch.dtype, device: str) -> None:
    tensors = random_slices([BLOCK + 5, 4097, 30, 30], FP32, 16, device)
    tensors[0][BLOCK + 2] = torch.nan
    # The smallest of all NaNs, which has to stay NaN when rounded; infinity comes after it.
    tensors[1][3:4] = torch.tensor([-0x7FFFFF], dtype=torch.int32).view(FP32)
    tensors[1][4096] = torch.inf
    tensors[2][29] = -torch.inf
    amax = torch.tensor([0.0, 1.0, 2.0, torch.nan], device=device)
    run(amax, tensors, through)
    assert amax.isnan().tolist() == [True, True, False, True] and amax[2] == torch.inf


@CAST
@FORMATS
@ROUNDINGS
@GAPS
def test_cast_against_float64(
    run: Any, source_dtype: torch.dtype, through: torch.dtype, dtype: torch.dtype, gap: int, device: str
) -> None:
    sources = random_slices(NUMELS, source_dtype, gap, device)
    flat, targets = poisoned_slices(NUMELS, dtype, gap, device)
    scale = random_scales(len(NUMELS), device)
    run(scale, sources, targets, through)
    for source, target, factor in zip(sources, targets, scale, strict=True):
        # One rounding of the product to FP32, one to FP8.
        product = (source.to(through).double() * factor.double()).float()
        assert torch.equal(bits(target), bits(saturated(product, dtype)))
    written = torch.zeros(flat.numel(), dtype=torch.bool, device=device)
    for view in slices(written, NUMELS, gap):
        view.fill_(True)
    assert (bits(flat)[~written] == POISON).all(), "the gaps are left alone"


@CAST
@FORMATS
@THROUGH
@pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")
def test_special_values(run: Any, through: torch.dtype, dtype: torch.dtype, device: str) -> None:
    largest, smallest = torch.finfo(dtype).max, torch.finfo(dtype).smallest_normal
    values = [0.0, -0.0, 2.0**-149, -(2.0**-130), torch.inf, -torch.inf, 3e38, -3e38, torch.nan]
    values += [largest, -largest, smallest, -smallest / 4 * 1.5, largest * 1.03, largest * 1.2]
    # In a whole block, and in a partial one.
    sources = [torch.tensor(values, device=device), torch.zeros(BLOCK, device=device)]
    sources[1][: len(values)] = sources[0]
    _, targets = poisoned_slices([len(values), BLOCK], dtype, 16, device)
    run(torch.ones(2, device=device), sources, targets, through)
    expected = saturated(sources[0].to(through).float(), dtype)
    for target in targets:
        ours, theirs = target[: len(values)].float(), expected.float()
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
        assert torch.signbit(ours[:2]).tolist() == [False, True]
        assert ours[4:9].tolist()[:4] == [largest, -largest] * 2 and ours[8].isnan(), "infinity saturates"


@pytest.mark.parametrize("numels", [[], [0], [0, 0, 0]])
def test_nothing_at_all(numels: list[int], device: str) -> None:
    sources = [torch.empty(numel, device=device) for numel in numels]
    targets = [source.to(E4M3) for source in sources]
    amax = torch.full((len(numels),), 3.0, device=device)
    max_abs_many(sources, amax, through=BF16)
    assert amax.tolist() == [3.0] * len(numels)
    cast_many(sources, targets, amax, through=BF16)


def test_many_tensors_at_once(device: str) -> None:
    numels = [index % 40 for index in range(300)]
    sources = random_slices(numels, FP32, 16, device)
    amax = torch.zeros(len(numels), device=device)
    module.max_abs_launch(amax, sources, BF16)
    theirs = torch.zeros_like(amax)
    module.max_abs_reference(theirs, sources, BF16)
    assert torch.equal(amax, theirs)


def test_public_calls() -> None:
    sources = [torch.randn(20), torch.randn(0), torch.randn(7)]
    targets = [torch.empty(source.shape, dtype=E5M2) for source in sources]
    amax, scale = torch.zeros(3), torch.tensor([2.0, 4.0, 8.0])
    max_abs_many(sources, amax, through=FP32)
    assert amax.tolist() == [sources[0].abs().max().item(), 0.0, sources[2].abs().max().item()]
    cast_many(sources, targets, scale, through=FP32)
    for source, target, factor in zip(sources, targets, scale, strict=True):
        assert torch.equal(bits(target), bits((source * factor).to(E5M2)))


def test_what_does_not_fit_is_named() -> None:
    x, q, two = torch.randn(4), torch.zeros(4).to(E4M3), torch.ones(2)
    with pytest.raises(ValueError, match=r"amax is torch\.float32 \(2,\).* shape \(1,\)"):
        max_abs_many([x], two, through=BF16)
    assert_raises(ValueError, r"amax is torch\.float64", max_abs_many, [x, x], two.double(), through=BF16)
    with pytest.raises(ValueError, match=r"tensors\[1\] is torch\.float64"):
        max_abs_many([x, x.double()], two, through=BF16)
    with pytest.raises(
        ValueError, match=r"tensors\[1\] is torch\.bfloat16 .* torch\.float32 like tensors\[0\]"
    ):
        max_abs_many([x, x.bfloat16()], two, through=BF16)
    with pytest.raises(ValueError, match=r"tensors\[0\] is torch\.int32; it must be torch\.float32 or"):
        max_abs_many([x.int(), x], two, through=BF16)
    with pytest.raises(ValueError, match=r"tensors\[0\] .* strides \(2,\) on cpu; it must be contiguous"):
        max_abs_many([x[::2], x], two, through=BF16)
    assert_raises(ValueError, r"through is torch\.float64", max_abs_many, [x, x], two, through=torch.float64)
    assert_raises(ValueError, "2 sources and 1 targets", cast_many, [x, x], [q], two, through=BF16)
    assert_raises(ValueError, r"scale is torch\.float32 \(2,\)", cast_many, [x], [q], two, through=BF16)
    with pytest.raises(ValueError, match=r"sources\[1\] is torch\.float32 of shape \(2, 2\)"):
        cast_many([x, x.view(2, 2)], [q, q], two, through=BF16)
    with pytest.raises(ValueError, match=r"targets\[0\] is torch\.bfloat16"):
        cast_many([x, x], [x.bfloat16(), q], two, through=BF16)
    with pytest.raises(ValueError, match=r"targets\[1\] is torch\.float8_e5m2 .* torch\.float8_e4m3fn"):
        cast_many([x, x], [q, x.to(E5M2)], two, through=BF16)
    with pytest.raises(ValueError, match=r"targets\[1\] .* \(4,\) .* on meta; .* on cpu"):
        cast_many([x, x], [q, q.to("meta")], two, through=BF16)
    with pytest.raises(ValueError, match=r"targets\[1\] has 3 elements, but sources\[1\] has 4"):
        cast_many([x, x], [q, q[:3]], two, through=BF16)
    with pytest.raises(ValueError, match=r"through is torch\.float8_e4m3fn"):
        cast_many([x, x], [q, q], two, through=E4M3)


def test_compiled_and_faked_calls_go_through_the_operators() -> None:
    sources, one = [torch.randn(4), torch.randn(7)], torch.ones(2)
    targets = [source.to(E4M3) for source in sources]
    check_operator("max_abs_many_", one, sources, BF16)
    check_operator("cast_many_", one, sources, targets, BF16)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_host_does_not_wait() -> None:
    """Tables of calls in flight are unchanged: nobody writes into their pinned memory too early."""
    sources = random_slices(NUMELS, FP32, 16, "cuda")
    scale = random_scales(len(NUMELS), "cuda")
    results = [
        (torch.zeros_like(scale), poisoned_slices(NUMELS, E4M3, 16, "cuda")[1], shift) for shift in range(50)
    ]

    def run(amax: Tensor, targets: list[Tensor], shift: int) -> None:
        """Puts other tensors into each place."""
        turned = [*sources[shift % 3 :], *sources[: shift % 3]]
        max_abs_many(turned, amax, through=BF16)
        cast_many(sources, targets, scale, through=BF16)

    run(*results[0])  # compiles
    results[0][0].zero_()
    with without_synchronisation():
        torch.cuda._sleep(10_000_000)
        for result in results:
            run(*result)
    amax, targets = torch.zeros_like(scale), poisoned_slices(NUMELS, E4M3, 16, "cuda")[1]
    module.max_abs_reference(amax, sources, BF16)
    module.cast_reference(scale, sources, targets, BF16)
    for ours, ours_targets, shift in results:
        assert torch.equal(ours, amax.roll(-(shift % 3)))
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(ours_targets, targets, strict=True))


def compiled(kernel: str, **constants: Any) -> Compiled:
    scale = {"max_abs_many": "amax_ptr", "cast_many": "scale_ptr"}[kernel]
    types = {scale: "*fp32", "table_ptr": "*i64", "n": "i32"}
    constants |= {"N_POW2": 512, "THROUGH": tl.bfloat16, "ALIGNED": True}
    return compile_for_hopper(
        f"cast.shard_cast._{kernel}_kernel", types, constants, tile=find(kernel, FP32, 1)
    )


SOURCES = pytest.mark.parametrize(("source", "vector"), [("float32", 4), ("bfloat16", 8)])
"""Dtypes, and the number of elements in 16 bytes."""


@SOURCES
def test_max_abs_compiles_for_hopper_with_wide_loads_and_without_spills(source: str, vector: int) -> None:
    result = compiled("max_abs_many", DTYPE=getattr(tl, source))
    assert result.count("ld.global.v4.b32") == result.elements // vector
    assert result.count("atom.global") == 1, "one for a program"
    assert result.registers <= 128


@SOURCES
@pytest.mark.parametrize("target", ["float8e4nv", "float8e5"])
def test_cast_compiles_for_hopper_with_wide_loads_and_without_spills(
    source: str, vector: int, target: str
) -> None:
    result = compiled("cast_many", SOURCE=getattr(tl, source), TARGET=getattr(tl, target))
    assert result.count("ld.global.v4.b32") == result.elements // vector
    assert result.count("st.global.v4.b32") == result.elements // 16
    assert "cvt.rn.satfinite" in result.ptx
    assert not endangered_pairs(result.ptx)
