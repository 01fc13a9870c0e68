"""AdamW over many runs, against PyTorch's in FP64; the kernel against the reference, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton.language as tl
from torch import Tensor

from flatfsdp.kernels.optim import adamw as module
from flatfsdp.kernels.optim.adamw import Corrected, Numbers, adamw, bias_corrected
from flatfsdp.kernels.optim.runs import Run
from flatfsdp.kernels.shared.tiles import find
from tests.support.gpu.waiting import without_synchronisation
from tests.support.kernels.flat_runs import FlatRuns, same
from tests.support.kernels.optimizers import check_compiled
from tests.support.kernels.running import both, check_operator

BOTH = both(module.reference, module.launch)
BLOCK = find("adamw", torch.float32, 1).cols
NUMELS = [5, 16, BLOCK, 123, BLOCK + 1, 0, 2 * BLOCK + 48, 1]
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
ALL_FP32 = [FP32] * 4
OPTIONS: dict[str, Any] = {"betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.1}


def numbers(index: int) -> Numbers:
    """Distinct numbers for every run."""
    return Numbers.of(1e-3 * (index + 1), OPTIONS["betas"], OPTIONS["weight_decay"])


def corrected(lr: float, step: int, dtype: torch.dtype = FP32, device: str = "cpu") -> Tensor:
    options = Corrected(lr, OPTIONS["eps"], *OPTIONS["betas"])
    return bias_corrected([torch.full((), float(step), device=device)], [options], dtype)[0]


def on_device(index: int) -> list[float]:
    return corrected(1e-3 * (index + 1), index + 1).tolist()


def random_runs(numels: Any, dtypes: Any, device: str, **options: Any) -> FlatRuns:
    return FlatRuns.random(numels, numbers, dtypes, device, on_device=on_device, **options)


def scale_of(value: float | None, device: str) -> Tensor | None:
    return None if value is None else torch.tensor(value, device=device)


@pytest.mark.parametrize("gap", [16, 1], ids=["aligned", "unaligned"])
@pytest.mark.parametrize("grad", [FP32, BF16, FP16], ids=str)
@pytest.mark.parametrize("moments", [(FP32, FP32), (BF16, BF16), (BF16, FP32)], ids=str)
def test_kernel_and_reference_have_the_same_bits(
    moments: tuple[torch.dtype, torch.dtype], grad: torch.dtype, gap: int, device: str
) -> None:
    """The gaps keep their bits, and so do copies and amaxes that were not requested."""
    start = random_runs(NUMELS, [FP32, grad, *moments], device, gap=gap)
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
    problem = random_runs(NUMELS, ALL_FP32, device, copy=copy)
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
    problem = random_runs([4 * BLOCK + 7] * 4, ALL_FP32, device)
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
    """The error against torch.optim.AdamW in FP64 from the same state is half a unit in the last place."""
    problem = random_runs([3 * BLOCK + 5], ALL_FP32, device)
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
def test_a_scale_is_a_multiplication_of_the_gradient(run: Any, device: str) -> None:
    """FP32 gradients scaled, and rounded, before the step give the same bits."""
    ours = random_runs(NUMELS, ALL_FP32, device)
    apart = ours.clone()
    scale = scale_of(0.123, device)
    apart.flats[1].mul_(scale)
    ours.call(run, scale)
    apart.call(run, None)
    apart.flats[1].copy_(ours.flats[1])
    assert same(ours, apart)


@BOTH
def test_the_parameter_sees_moments_before_they_are_rounded(run: Any, device: str) -> None:
    narrow = random_runs([BLOCK + 9], [FP32, FP32, BF16, BF16], device)
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
    """Without a gradient and a moment only the decay changes anything; infinity is not hidden."""
    first_step = torch.ones((), device=device)
    (given,) = bias_corrected([first_step], [Corrected(1e-2, 1e-8, 0.9, 0.95)], FP32)
    own = Numbers.of(1e-2, (0.9, 0.95), 0.5)
    problem = FlatRuns.random([4], lambda _: own, ALL_FP32, device, on_device=lambda _: given.tolist())
    param, grad, first, second = problem.flats[:4]
    param[:4] = torch.tensor([1.0, 0.0, 1.0, 1.0], device=device)
    grad[:4] = torch.tensor([0.0, 0.0, torch.inf, 2.0**-149], device=device)
    first[:4] = second[:4] = 0.0
    problem.call(run, None)
    assert param[0] == torch.tensor(1.0) - torch.tensor(1e-2 * 0.5) and param[1] == 0.0
    assert param[2].isnan() and param[3].isfinite()
    assert second[2] == torch.inf and problem.amaxes[0].isnan()


@pytest.mark.filterwarnings("ignore:invalid value")
@BOTH
@pytest.mark.parametrize("dtypes", [ALL_FP32, [FP32, BF16, BF16, BF16]], ids=["fp32", "bf16"])
@pytest.mark.parametrize("gap", [16, 1], ids=["aligned", "unaligned"])
def test_a_step_that_is_left_out_keeps_all_bits(run: Any, gap: int, dtypes: Any, device: str) -> None:
    """This holds whatever the gradients are; copies and amaxes are those of the unchanged parameters."""
    start = random_runs(NUMELS, dtypes, device, gap=gap)
    for value, index in ((torch.nan, 0), (torch.inf, 2), (-torch.inf, 5)):
        start.flats[1][start.starts[index]] = value
    # Moments of a skipped first step, whose bias corrections are 0 / 0.
    start.on_device[2] = torch.tensor([torch.nan, 0.0], device=device)
    left_out, plain = start.clone(), start.clone()
    left_out.call(run, scale_of(0.3, device), taken=torch.zeros((), device=device))
    assert all(torch.equal(a, b) for a, b in zip(left_out.bits()[: len(dtypes)], start.bits(), strict=False))
    for own, kept in zip(plain.runs, left_out.runs, strict=True):
        rounded = own.param.to(BF16)
        assert kept.compute is None or torch.equal(kept.compute, rounded)
        assert kept.amax is None or kept.amax == (rounded.abs().max() if len(rounded) else 0.0)


@BOTH
def test_a_step_that_is_taken_is_the_same_step(run: Any, device: str) -> None:
    start = random_runs(NUMELS, [FP32, FP32, BF16, BF16], device)
    asked, plain = start.clone(), start.clone()
    asked.call(run, None, taken=torch.ones((), device=device))
    plain.call(run, None)
    assert same(asked, plain)


def test_bias_corrections_of_many_parameters_at_once(device: str) -> None:
    """Results equal the host's in FP64, each from its own options and count of steps."""
    counts = [1, 2, 7, 1000, 250_000]
    options = [Corrected(1e-3 * (i + 1), 10.0**-i, 0.9, 1 - 10.0 ** -(i + 1)) for i in range(len(counts))]
    steps = [torch.tensor(float(count), device=device) for count in counts]
    for dtype in (FP32, torch.float64):
        results = bias_corrected(steps, options, dtype)
        for own, count, result in zip(options, counts, results, strict=True):
            root = (1 - own.beta2**count) ** 0.5
            exact = [own.lr * root / (1 - own.beta1**count), own.eps * root]
            assert result.dtype == dtype and result.is_contiguous()
            tolerance = 1e-13 if dtype == torch.float64 else 6e-8
            torch.testing.assert_close(
                result.double().cpu(), torch.tensor(exact, dtype=torch.float64), rtol=tolerance, atol=0
            )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_host_does_not_wait() -> None:
    problem = random_runs(NUMELS, ALL_FP32, "cuda")
    scale, taken = torch.tensor(0.5, device="cuda"), torch.ones((), device="cuda")
    adamw(problem.runs, grad_scale=scale, taken=taken, dtype=BF16)  # compiles
    with without_synchronisation():
        torch.cuda._sleep(10_000_000)
        for _ in range(20):
            adamw(problem.runs, grad_scale=scale, taken=taken, dtype=BF16)
            corrected(1e-3, 1, device="cuda")


def test_parameters_that_are_no_kernels_matter(device: str) -> None:
    """Other dtypes and layouts use plain PyTorch, also on a GPU."""
    for dtype, tolerance in ((torch.float64, 1e-12), (BF16, 2e-2)):
        values = [torch.randn(6, 5).to(device, dtype).t() for _ in range(4)]
        values[3] = values[3].square()
        exact = [value.to(torch.float64, copy=True).requires_grad_() for value in values]
        given = corrected(0.01, 1, torch.promote_types(dtype, FP32), device)
        own = Numbers.of(0.01, OPTIONS["betas"], OPTIONS["weight_decay"])
        adamw([Run(values[0], values[1], values[2:], own, given)])
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
    adamw([Run(empty, empty, [empty, empty], numbers(0), corrected(1e-3, 1, device=device))])


def test_what_does_not_fit_is_named() -> None:
    x, narrow = torch.ones(4), torch.ones(4, dtype=BF16)
    good = Run(x, x, [x, x], numbers(0), corrected(1e-3, 1))
    wrong: list[tuple[Any, dict[str, Any], str]] = [
        (good._replace(grad=x[:3]), {}, r"grad of run 1 is torch\.float32 \(3,\)"),
        (good._replace(grad=narrow), {}, r"grad of run 1 is torch\.bfloat16 .* must be torch\.float32"),
        (good._replace(states=[x, narrow]), {}, r"states\[1\] of run 1 is torch\.bfloat16"),
        (good._replace(compute=narrow), {}, "compute of run 1 .* must be None"),
        (good._replace(compute=x), {"dtype": BF16}, r"compute of run 1 .* must be torch\.bfloat16"),
        (good._replace(amax=x[:1]), {}, "run 1 has an amax"),
        (good._replace(amax=x), {"dtype": BF16}, "amax of run 1"),
        (good, {"grad_scale": narrow[0]}, r"grad_scale is torch\.bfloat16"),
        (good, {"taken": narrow[0]}, r"taken is torch\.bfloat16"),
        (good._replace(on_device=narrow[:2]), {}, r"on_device of run 1 is torch\.bfloat16"),
    ]
    for run, options, message in wrong:
        with pytest.raises(ValueError, match=message):
            adamw([good, run], **options)


def test_compiled_and_faked_calls_go_through_the_operator() -> None:
    tensors = [[torch.rand(4), torch.rand(7)] for _ in range(4)]
    computes = [torch.zeros(4, dtype=BF16), torch.zeros(0, dtype=BF16)]
    own = [number for index in range(2) for number in numbers(index)]
    given = [corrected(1e-3, 1), corrected(1e-3, 2)]
    amaxes = [torch.zeros(1), torch.zeros(1)]
    arguments = (torch.empty(0), *tensors, own, given, computes, amaxes, None, torch.ones(()), BF16)
    check_operator("adamw_", *arguments)


@pytest.mark.parametrize("always", [True, False], ids=["always taken", "maybe left out"])
@pytest.mark.parametrize("copy", [None, tl.bfloat16], ids=str)
def test_it_compiles_for_hopper_with_wide_loads_and_without_spills(copy: Any, always: bool) -> None:
    types = {"GRAD": tl.float32, "MOMENT": tl.float32, "DTYPE": copy}
    check_compiled("adamw", types, always=always, read=4, written=3)
