"""AdamW over many runs, against PyTorch's in FP64; the kernel against the reference, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton.language as tl
from torch import Tensor, library

from flatfsdp.kernels.optim import adamw as module
from flatfsdp.kernels.optim.adamw import Numbers, adamw
from flatfsdp.kernels.optim.runs import Run
from flatfsdp.kernels.shared.tiles import find
from tests.support.kernels.compiling import SHARED_LIMIT, compile_for_hopper
from tests.support.kernels.flat_runs import FlatRuns, same

BOTH = pytest.mark.parametrize("run", [module.reference, module.launch], ids=["reference", "kernel"])
TILE = find("adamw", torch.float32, 1)
BLOCK = TILE.cols
NUMELS = [5, 16, BLOCK, 123, BLOCK + 1, 0, 2 * BLOCK + 48, 1]
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
ALL_FP32 = [FP32] * 4
OPTIONS: dict[str, Any] = {"betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.1}


def numbers(index: int) -> Numbers:
    """Every run has its own."""
    return Numbers.of(1e-3 * (index + 1), **OPTIONS, step=index + 1)


def scale_of(value: float | None, device: str) -> Tensor | None:
    return None if value is None else torch.tensor(value, device=device)


@pytest.mark.parametrize("gap", [16, 1], ids=["aligned", "unaligned"])
@pytest.mark.parametrize("grad", [FP32, BF16, FP16], ids=str)
@pytest.mark.parametrize("moments", [(FP32, FP32), (BF16, BF16), (BF16, FP32)], ids=str)
def test_kernel_and_reference_have_the_same_bits(
    moments: tuple[torch.dtype, torch.dtype], grad: torch.dtype, gap: int, device: str
) -> None:
    """The gaps, and copies and amaxes that were not asked for, keep theirs."""
    start = FlatRuns.random(NUMELS, numbers, [FP32, grad, *moments], device, gap=gap)
    ours, twice, reference = start.clone(), start.clone(), start.clone()
    for problem, run in ((ours, module.launch), (twice, module.launch), (reference, module.reference)):
        for _ in range(2):
            problem.call(run, scale_of(0.3, device))
    assert same(ours, reference)
    assert same(ours, twice)
    assert not same(ours, start)


@BOTH
@pytest.mark.parametrize("copy", [BF16, FP16, FP32], ids=str)
def test_copies_and_amaxes_are_of_the_new_values(run: Any, copy: torch.dtype, device: str) -> None:
    problem = FlatRuns.random(NUMELS, numbers, ALL_FP32, device, copy=copy)
    problem.call(run, None)
    for index, (start, stop) in enumerate(zip(problem.starts, problem.stops, strict=True)):
        rounded = problem.flats[0][start:stop].to(copy)
        compute = problem.flats[-1][start:stop]
        assert torch.equal(compute, rounded) if index % 3 != 2 else compute.isnan().all()
        if index % 3 == 0:
            assert problem.amaxes[index] == rounded.abs().max()


@pytest.mark.filterwarnings("ignore:invalid value")  # from numpy, which interprets kernels
@BOTH
def test_an_amax_only_rises_and_keeps_nan(run: Any, device: str) -> None:
    problem = FlatRuns.random([4 * BLOCK + 7] * 4, numbers, ALL_FP32, device)
    problem.amaxes[3] = 100.0
    problem.flats[1][problem.starts[0] + BLOCK] = torch.nan
    problem.call(run, None)
    assert problem.amaxes[0].isnan() and problem.amaxes[3] == 100.0
    problem.flats[1][problem.starts[3]] = -torch.inf
    problem.call(run, None)
    assert problem.amaxes[3].isnan()


@BOTH
@pytest.mark.parametrize("scale", [None, 0.37])
def test_a_step_rounds_once(run: Any, scale: float | None, device: str) -> None:
    """Against torch.optim.AdamW in FP64 from the same state: half a unit in the last place."""
    problem = FlatRuns.random([3 * BLOCK + 5], numbers, ALL_FP32, device)
    before, grad, *moments = (flat[: problem.stops[0]].double() for flat in problem.flats[:-1])
    exact = torch.nn.Parameter(before.clone())
    reference = torch.optim.AdamW([exact], lr=1e-3, **OPTIONS)
    step = torch.zeros(())
    reference.state[exact] = {"step": step, "exp_avg": moments[0], "exp_avg_sq": moments[1]}
    exact.grad = grad * (1.0 if scale is None else torch.tensor(scale).double().item())
    reference.step()
    problem.call(run, scale_of(scale, device))
    param, _, *ours, _ = (flat[: problem.stops[0]] for flat in problem.flats)
    unit = torch.nextafter(param.abs(), torch.full_like(param, torch.inf)).double() - param.abs().double()
    change = (exact.detach() - before).abs()
    assert torch.all((param.double() - exact.detach()).abs() <= 0.5 * unit + 1e-6 * change)
    for moment, right in zip(ours, moments, strict=True):
        torch.testing.assert_close(moment.double(), right, rtol=1e-6, atol=1e-7)


@BOTH
def test_a_hundred_steps_against_float64(run: Any, device: str) -> None:
    problem = FlatRuns.random([BLOCK + 300], numbers, ALL_FP32, device)
    stop = problem.stops[0]
    for moment in problem.flats[2:4]:
        moment[:stop] = 0.0
    exact = torch.nn.Parameter(problem.flats[0][:stop].double())
    reference = torch.optim.AdamW([exact], lr=2e-3, **OPTIONS)
    for step in range(1, 101):
        grad = torch.randn(stop, device=device)
        exact.grad = grad.double()
        reference.step()
        problem.flats[1][:stop] = grad
        problem.numbers = [Numbers.of(2e-3, **OPTIONS, step=step)]
        problem.call(run, None)
    state = reference.state[exact]
    for ours, right in zip(problem.flats, (exact, None, state["exp_avg"], state["exp_avg_sq"]), strict=False):
        if right is not None:
            assert (ours[:stop] - right).norm() <= 1e-6 * right.norm()


@BOTH
def test_a_scale_is_a_multiplication_of_the_gradient(run: Any, device: str) -> None:
    """FP32 gradients that were scaled, and rounded, before the step give the same bits."""
    ours = FlatRuns.random(NUMELS, numbers, ALL_FP32, device)
    apart = ours.clone()
    scale = scale_of(0.123, device)
    apart.flats[1].mul_(scale)
    ours.call(run, scale)
    apart.call(run, None)
    apart.flats[1].copy_(ours.flats[1])
    assert same(ours, apart)


@BOTH
def test_the_parameter_sees_moments_before_they_are_rounded(run: Any, device: str) -> None:
    narrow = FlatRuns.random([BLOCK + 9], numbers, [FP32, FP32, BF16, BF16], device)
    wide = narrow.clone()
    wide.flats[2:4] = [moment.float() for moment in narrow.flats[2:4]]
    for problem in (narrow, wide):
        problem.call(run, None)
    stop = narrow.stops[0]
    assert torch.equal(narrow.flats[0][:stop], wide.flats[0][:stop])
    for rounded, moment in zip(narrow.flats[2:4], wide.flats[2:4], strict=True):
        assert torch.equal(rounded[:stop], moment[:stop].bfloat16())


@pytest.mark.filterwarnings("ignore:invalid value")
@BOTH
def test_special_values(run: Any, device: str) -> None:
    """Without a gradient and a moment nothing changes but by the decay; infinity is not hidden."""
    problem = FlatRuns.random([4], lambda _: Numbers.of(1e-2, (0.9, 0.95), 1e-8, 0.5, 1), ALL_FP32, device)
    param, grad, first, second = problem.flats[:4]
    param[:4] = torch.tensor([1.0, 0.0, 1.0, 1.0], device=device)
    grad[:4] = torch.tensor([0.0, 0.0, torch.inf, 2.0**-149], device=device)
    first[:4] = second[:4] = 0.0
    problem.call(run, None)
    assert param[0] == torch.tensor(1.0) - torch.tensor(1e-2 * 0.5) and param[1] == 0.0
    assert param[2].isnan() and param[3].isfinite()
    assert second[2] == torch.inf and problem.amaxes[0].isnan()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_host_does_not_wait() -> None:
    problem = FlatRuns.random(NUMELS, numbers, ALL_FP32, "cuda")
    scale = torch.tensor(0.5, device="cuda")
    adamw(problem.runs, grad_scale=scale, dtype=BF16)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(10_000_000)
        for _ in range(20):
            adamw(problem.runs, grad_scale=scale, dtype=BF16)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_parameters_that_are_no_kernels_matter(device: str) -> None:
    """Other dtypes and layouts take plain PyTorch, also where there is a GPU."""
    for dtype, tolerance in ((torch.float64, 1e-12), (BF16, 2e-2)):
        values = [torch.randn(6, 5).to(device, dtype).t() for _ in range(4)]
        values[3] = values[3].square()
        exact = [value.to(torch.float64, copy=True).requires_grad_() for value in values]
        adamw([Run(values[0], values[1], values[2:], Numbers.of(0.01, **OPTIONS, step=1))])
        reference = torch.optim.AdamW(exact[:1], lr=0.01, **OPTIONS)
        moments = [moment.detach() for moment in exact[2:]]
        reference.state[exact[0]] = dict(
            zip(("step", "exp_avg", "exp_avg_sq"), (torch.zeros(()), *moments), strict=True)
        )
        exact[0].grad = exact[1].detach()
        reference.step()
        torch.testing.assert_close(values[0].double(), exact[0].detach(), rtol=tolerance, atol=tolerance)


def test_no_runs_and_empty_ones(device: str) -> None:
    adamw([])
    empty = torch.zeros(0, device=device)
    adamw([Run(empty, empty, [empty, empty], numbers(0))])


def test_what_does_not_fit_is_named() -> None:
    x, narrow = torch.ones(4), torch.ones(4, dtype=BF16)
    good = Run(x, x, [x, x], numbers(0))
    wrong: list[tuple[Any, dict[str, Any], str]] = [
        (good._replace(grad=x[:3]), {}, r"grad of run 1 is torch\.float32 \(3,\)"),
        (good._replace(grad=narrow), {}, r"grad of run 1 is torch\.bfloat16 .* must be torch\.float32"),
        (good._replace(states=[x, narrow]), {}, r"states\[1\] of run 1 is torch\.bfloat16"),
        (good._replace(compute=narrow), {}, "compute of run 1 .* must be None"),
        (good._replace(compute=x), {"dtype": BF16}, r"compute of run 1 .* must be torch\.bfloat16"),
        (good._replace(amax=x[:1]), {}, "run 1 has an amax"),
        (good._replace(amax=x), {"dtype": BF16}, "amax of run 1"),
        (good, {"grad_scale": narrow[0]}, r"grad_scale is torch\.bfloat16"),
    ]
    for run, options, message in wrong:
        with pytest.raises(ValueError, match=message):
            adamw([good, run], **options)


def test_compiled_and_faked_calls_go_through_the_operator() -> None:
    tensors = [[torch.rand(4), torch.rand(7)] for _ in range(4)]
    computes = [torch.zeros(4, dtype=BF16), torch.zeros(0, dtype=BF16)]
    own = [number for index in range(2) for number in numbers(index)]
    arguments = (torch.empty(0), *tensors, own, computes, [torch.zeros(1), torch.zeros(1)], None, BF16)
    library.opcheck(torch.ops.flatfsdp.adamw_.default, arguments)


@pytest.mark.parametrize("copy", [None, tl.bfloat16], ids=str)
def test_it_compiles_for_hopper_with_wide_loads_and_without_spills(copy: Any) -> None:
    types = {"GRAD": tl.float32, "MOMENT": tl.float32, "DTYPE": copy}
    compiled = compile_for_hopper(
        "optim.adamw",
        "_adamw_kernel",
        {"table_ptr": "*i64", "n": "i32", "grad_scale_ptr": "*fp32"},
        {**types, "N_POW2": 512, "BLOCK": BLOCK, "ALIGNED": True},
        num_warps=TILE.warps,
        contract=False,
    )
    assert compiled.spilled == 0 and compiled.shared <= SHARED_LIMIT
    assert "fma.rn" not in compiled.ptx
    per_thread = BLOCK // (32 * TILE.warps)
    # 16 bytes at a time: four tensors are read and three written.
    assert compiled.ptx.count("ld.global.v4.b32") == 4 * per_thread // 4
    assert compiled.ptx.count("st.global.v4.b32") == 3 * per_thread // 4
