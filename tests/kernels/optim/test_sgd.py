"""SGD over many runs, against PyTorch's in FP64; the kernel against the reference, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton.language as tl
from torch import Tensor

from flatfsdp.kernels.optim import sgd as module
from flatfsdp.kernels.optim.runs import Run
from flatfsdp.kernels.optim.sgd import Numbers, sgd
from flatfsdp.kernels.shared.tiles import find
from tests.support.kernels.flat_runs import FlatRuns, same
from tests.support.kernels.optimizers import check_compiled
from tests.support.kernels.running import both, check_operator

BOTH = both(module.reference, module.launch)
BLOCK = find("sgd", torch.float32, 1).cols
NUMELS = [5, BLOCK, 123, BLOCK + 1, 0, 2 * BLOCK + 48, 1]
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
KINDS = pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.9, True)])


def numbers(index: int) -> Numbers:
    """Distinct numbers for every run."""
    return Numbers(0.1 * (index + 1), 0.01, 0.9, 0.8)


def steps(index: int) -> list[float]:
    """Step counts; for every other run it is the first step."""
    return [float(1 + index % 2)]


def called(
    start: FlatRuns,
    function: Callable[..., None],
    momentum: float,
    nesterov: bool,
    taken: Tensor | None = None,
) -> FlatRuns:
    """A copy, after two steps."""
    problem = start.clone()
    scale = torch.tensor(0.3, device=start.amaxes.device)

    def on_buffers(like: Tensor, params: Any, grads: Any, *rest: Any) -> None:
        function(like, params, grads, *(rest if momentum else ([], *rest)))

    for _ in range(2):
        problem.call(on_buffers, scale, nesterov, taken=taken)
    return problem


@pytest.mark.parametrize("gap", [16, 1], ids=["aligned", "unaligned"])
@pytest.mark.parametrize("grad", [FP32, BF16, FP16], ids=str)
@KINDS
def test_kernel_and_reference_have_the_same_bits(
    momentum: float, nesterov: bool, grad: torch.dtype, gap: int, device: str
) -> None:
    dtypes = [FP32, grad, FP32] if momentum else [FP32, grad]
    start = FlatRuns.random(NUMELS, numbers, dtypes, device, gap=gap, on_device=steps)
    ours, twice = (called(start, module.launch, momentum, nesterov) for _ in range(2))
    reference = called(start, module.reference, momentum, nesterov)
    assert same(ours, reference)
    assert same(ours, twice)
    assert not same(ours, start)


@pytest.mark.filterwarnings("ignore:invalid value")  # from numpy, which interprets kernels
@BOTH
@KINDS
def test_a_step_that_is_left_out_keeps_all_bits(
    run: Any, momentum: float, nesterov: bool, device: str
) -> None:
    dtypes = [FP32, FP32, BF16] if momentum else [FP32, FP32]
    start = FlatRuns.random(NUMELS, numbers, dtypes, device, on_device=steps)
    taken = called(start, run, momentum, nesterov, torch.ones((), device=device))
    assert same(taken, called(start, run, momentum, nesterov))
    start.flats[1][start.starts[1]], start.flats[1][start.starts[2]] = torch.nan, torch.inf
    left_out = called(start, run, momentum, nesterov, torch.zeros((), device=device))
    kept = zip(left_out.bits()[: len(dtypes)], start.bits(), strict=False)
    assert all(torch.equal(a, b) for a, b in kept)
    for own in left_out.runs:
        assert own.compute is None or torch.equal(own.compute, own.param.to(BF16))


@BOTH
@KINDS
def test_steps_against_float64(run: Any, momentum: float, nesterov: bool, device: str) -> None:
    """In the first step there is no momentum: it is not read, and NaN here."""
    numel, dampening = BLOCK + 9, 0.0 if nesterov else 0.2
    param = torch.randn(numel, device=device)
    exact = torch.nn.Parameter(param.double())
    options: dict[str, Any] = {"momentum": momentum, "nesterov": nesterov, "weight_decay": 0.1}
    if momentum:
        options["dampening"] = dampening
    reference = torch.optim.SGD([exact], lr=0.05, **options)
    buffers = [torch.full_like(param, torch.nan)] if momentum else []
    none = [torch.empty(0, device=device)]
    for step in range(5):
        grad = torch.randn(numel, device=device)
        exact.grad = grad.double()
        reference.step()
        own, count = Numbers(0.05, 0.1, momentum, 1 - dampening), [torch.full((), step + 1.0, device=device)]
        run(param, [param], [grad], buffers, list(own), count, none, none, None, None, nesterov, None)
    assert (param - exact).norm() <= 1e-6 * exact.norm()
    for buffer in buffers:
        right = reference.state[exact]["momentum_buffer"]
        assert (buffer - right).norm() <= 1e-6 * right.norm()


def test_copies_and_amaxes(device: str) -> None:
    problem = FlatRuns.random(NUMELS, numbers, [FP32, FP32, FP32], device, on_device=steps)
    sgd(problem.runs, dtype=BF16)
    for run in problem.runs:
        rounded = run.param.bfloat16()
        assert run.compute is None or torch.equal(run.compute, rounded)
        assert run.amax is None or run.amax == rounded.abs().max()


def test_what_does_not_fit_is_named() -> None:
    x = torch.ones(4)
    good = Run(x, x, [x], numbers(0), torch.ones(()))
    with pytest.raises(ValueError, match=r"states\[0\] of run 1 is torch\.float32 \(3,\)"):
        sgd([good, good._replace(states=[x[:3]])])
    with pytest.raises(ValueError, match="run 0 has 1 states and run 1 has 0"):
        sgd([good, good._replace(states=[])])


def test_compiled_and_faked_calls_go_through_the_operator() -> None:
    tensors = [[torch.rand(4), torch.rand(7)] for _ in range(3)]
    computes = [torch.zeros(4, dtype=BF16), torch.zeros(0, dtype=BF16)]
    own = [number for index in range(2) for number in numbers(index)]
    count, amaxes = [torch.ones(()), torch.ones(())], [torch.zeros(1), torch.zeros(1)]
    arguments = (torch.empty(0), *tensors, own, count, computes, amaxes, None, None, True, BF16)
    check_operator("sgd_", *arguments)


@pytest.mark.parametrize("always", [True, False], ids=["always taken", "maybe left out"])
def test_it_compiles_for_hopper_with_wide_loads_and_without_spills(always: bool) -> None:
    types = {"GRAD": tl.float32, "BUFFER": tl.float32, "NESTEROV": True, "DTYPE": tl.bfloat16}
    check_compiled("sgd", types, always=always, read=3, written=2)
