"""Statistics and gradient of cross-entropy against float64, for whole vocabularies and parts of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from flatfsdp.kernels import cross_entropy as module
from flatfsdp.kernels.cross_entropy import Statistics, cross_entropy_grad, cross_entropy_statistics
from tests.support.kernels.compiling import DTYPE_OF, VECTOR, X_TYPES, compile_for_hopper
from tests.support.kernels.running import DTYPES, both, check_operator, garbage

STATISTICS = both(module.statistics_reference, module.statistics_launch)
GRAD = both(module.grad_reference, module.grad_launch)
# One block and less, several, odd, and a rank's part of a vocabulary; with 8 tokens odd rows begin anywhere
# in a vector, and with 3 the number of vectors is not whole.
SHAPES = pytest.mark.parametrize(
    ("tokens", "cols"),
    [(3, 1), (3, 7), (3, 1000), (2, 4096), (2, 10007), (1, 16032), (8, 1), (8, 7), (8, 255), (8, 5001)],
)
EPS = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}


def batch(tokens: int, cols: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    """Logits, some of which are large, and targets."""
    logits = torch.randn(tokens, cols, device=device) * 6
    return logits.to(dtype), torch.randint(cols, (tokens,), device=device)


def statistics(run: Any, logits: Tensor, targets: Tensor, first: int = 0) -> Statistics:
    """Computes statistics into garbage memory."""
    out = garbage(3, len(logits), like=logits)
    run(logits, targets, first, out)
    return Statistics(*out)


def gradient(run: Any, logits: Tensor, *arguments: Any, inplace: bool = False) -> Tensor:
    out = logits.clone() if inplace else torch.full_like(logits, torch.nan)
    run(out, None if inplace else logits, *arguments)
    return out


def normaliser(logits: Tensor) -> tuple[Tensor, Tensor]:
    """FP32 maxima, and logarithms of the sums of exp(x - max)."""
    x = logits.double()
    largest = x.amax(1)
    return largest.float(), (x.logsumexp(1) - largest).float()


@STATISTICS
@DTYPES
@SHAPES
def test_statistics_against_float64(
    run: Any, dtype: torch.dtype, tokens: int, cols: int, device: str
) -> None:
    logits, targets = batch(tokens, cols, dtype, device)
    x = logits.double()
    got = statistics(run, logits, targets)
    assert torch.equal(got.max, x.amax(1).float())
    assert torch.equal(got.target, x.gather(1, targets[:, None])[:, 0].float())
    expected = (x - x.amax(1, keepdim=True)).exp().sum(1)
    assert ((got.sum - expected) / expected).abs().max() < 2e-6
    assert (got.loss - F.cross_entropy(x, targets, reduction="none")).abs().max() < 1e-5


@STATISTICS
def test_losses_of_large_logits_keep_their_digits(run: Any, device: str) -> None:
    """The sum max + log(sum) would round to 6e-5."""
    logits, targets = batch(5, 500, torch.float32, device)
    logits += 1000
    targets[:3] = logits[:3].argmax(1)
    expected = F.cross_entropy(logits.double(), targets, reduction="none")
    assert (statistics(run, logits, targets).loss - expected).abs().max() < 4e-6


@STATISTICS
def test_parts_of_a_vocabulary_have_the_targets_that_are_theirs(run: Any, device: str) -> None:
    logits, _ = batch(5, 300, torch.bfloat16, device)
    targets = torch.tensor([99, 100, 199, 200, -100], device=device)
    part = logits[:, 100:200].contiguous()
    got = statistics(run, part, targets, first=100)
    expected = [0.0, part[1, 0].item(), part[2, 99].item(), 0.0, 0.0]
    assert got.target.tolist() == expected
    assert torch.equal(got.max, part.float().amax(1))


@STATISTICS
def test_infinities_and_nan_do_what_they_do_in_torch(run: Any, device: str) -> None:
    logits, targets = batch(6, 5000, torch.float32, device)
    logits[1, 4500], logits[2, 0], logits[4, 100] = torch.nan, torch.inf, 3e38
    logits[3] = -torch.inf
    logits[5, :4999] = -torch.inf
    targets[5] = 4999
    got = statistics(run, logits, targets)
    loss = got.loss
    expected = F.cross_entropy(logits.double(), targets, reduction="none")
    assert torch.equal(loss.isnan(), torch.tensor([0, 1, 1, 1, 0, 0], device=device).bool())
    assert torch.allclose(loss.double(), expected, rtol=1e-6, atol=1e-6, equal_nan=True)


@STATISTICS
def test_a_part_that_is_all_minus_infinity_adds_nothing(run: Any, device: str) -> None:
    logits = torch.full((2, 600), -torch.inf, device=device)
    got = statistics(run, logits, torch.zeros(2, dtype=torch.int64, device=device), first=600)
    assert (got.max == module.LOWEST).all() and (got.sum == 0).all() and (got.target == 0).all()


@GRAD
@DTYPES
@SHAPES
def test_gradient_against_float64(run: Any, dtype: torch.dtype, tokens: int, cols: int, device: str) -> None:
    logits, targets = batch(tokens, cols, dtype, device)
    scale = torch.randn(tokens, device=device)
    x = logits.double().requires_grad_()
    F.cross_entropy(x, targets, reduction="none").backward(scale.double())
    got = gradient(run, logits, targets, *normaliser(logits), scale, 0, -100, inplace=tokens == 8)
    assert got.dtype == dtype
    # FP16 has no numbers between 0 and 6e-8.
    bound = 2 * EPS[dtype] * x.grad.abs() + 2e-7 * scale.abs()[:, None] + 6e-8
    assert ((got.double() - x.grad).abs() <= bound).all()


@GRAD
def test_in_place_it_has_the_same_bits(run: Any, device: str) -> None:
    for tokens, cols in ((3, 2500), (8, 2501)):
        logits, targets = batch(tokens, cols, torch.bfloat16, device)
        arguments = (targets, *normaliser(logits), torch.randn(tokens, device=device), 0, -100)
        one, two = (gradient(run, logits, *arguments, inplace=inplace) for inplace in (False, True))
        assert torch.equal(one, two)


@GRAD
@pytest.mark.parametrize("inplace", [False, True])
def test_ignored_tokens_get_zeros_whatever_their_logits(run: Any, inplace: bool, device: str) -> None:
    logits, targets = batch(4, 5000, torch.float32, device)
    targets[1] = targets[2] = 7
    logits[1, 5] = torch.nan
    scale = torch.tensor([1.0, torch.nan, torch.inf, 1.0], device=device)
    got = gradient(run, logits, targets, *normaliser(logits), scale, 0, 7, inplace=inplace)
    assert (got[1:3] == 0).all()
    assert (got[0] != 0).any() and (got[3] != 0).any()


@GRAD
def test_a_target_in_another_part_takes_nothing_away(run: Any, device: str) -> None:
    logits, _ = batch(4, 64, torch.float32, device)
    targets = torch.tensor([99, 100, 163, 164], device=device)
    scale = torch.ones(4, device=device)
    sums = gradient(run, logits, targets, *normaliser(logits), scale, 100, -100).sum(1)
    assert (sums - torch.tensor([1.0, 0.0, 0.0, 1.0], device=device)).abs().max() < 1e-5


@GRAD
def test_nan_and_infinity_reach_the_gradient(run: Any, device: str) -> None:
    logits, targets = batch(3, 40, torch.float32, device)
    logits[0, 3], logits[1, 3], logits[2, 3] = torch.nan, torch.inf, -torch.inf
    targets[2] = 0
    found = statistics(module.statistics_reference, logits, targets)
    scale = torch.ones(3, device=device)
    got = gradient(run, logits, targets, found.max, found.sum.log(), scale, 0, -100)
    assert got[:2].isnan().all()
    assert got[2, 3] == 0 and got[2].isfinite().all()


def test_rows_that_begin_within_a_vector_are_found() -> None:
    """They are found only if all bytes can be read in vectors."""
    logits = torch.randn(9, 9).bfloat16()
    assert module.is_shifted(logits[:8]) and not module.is_shifted(logits)
    assert not module.is_shifted(logits[1:]), "it begins at an odd address"
    assert not module.is_shifted(torch.randn(8, 16).bfloat16()), "whole vectors"
    assert module.is_shifted(torch.randn(4, 5)) and not module.is_shifted(torch.randn(4, 12))


@STATISTICS
def test_no_tokens(run: Any, device: str) -> None:
    logits = torch.empty(0, 8, device=device)
    targets, none = torch.empty(0, dtype=torch.int64, device=device), torch.empty(0, device=device)
    assert statistics(run, logits, targets).sum.shape == (0,)
    assert cross_entropy_grad(logits, targets, none, none, none).shape == (0, 8)


def test_public_functions_write_where_they_are_told(device: str) -> None:
    logits, targets = batch(5, 40, torch.bfloat16, device)
    got = Statistics(*cross_entropy_statistics(logits, targets))
    scale, before = torch.ones(5, device=device), logits.clone()
    grad = cross_entropy_grad(logits, targets, got.max, got.sum.log(), scale)
    assert torch.equal(logits, before) and logits._version == 0
    assert cross_entropy_grad(logits, targets, got.max, got.sum.log(), scale, inplace=True) is logits
    assert torch.equal(logits, grad) and logits._version > 0


def test_what_does_not_fit_is_named() -> None:
    logits, targets = batch(4, 6, torch.float32, "cpu")
    row = torch.zeros(4)
    for message, arguments in (
        (r"logits is torch\.float64", (logits.double(), targets)),
        (r"logits is .* strides \(1, 4\)", (torch.randn(6, 4).t(), targets)),
        (r"logits have shape \(4, 0\)", (logits[:, :0].contiguous(), targets)),
        (r"targets is torch\.int32 \(4,\)", (logits, targets.int())),
        (r"targets is torch\.int64 \(3,\)", (logits, targets[:3])),
    ):
        with pytest.raises(ValueError, match=message):
            cross_entropy_statistics(*arguments)
        with pytest.raises(ValueError, match=message):
            cross_entropy_grad(*arguments, row, row, row)
    with pytest.raises(ValueError, match=r"log_sum is torch\.float64"):
        cross_entropy_grad(logits, targets, row, row.double(), row)
    with pytest.raises(ValueError, match=r"scale is torch\.float32 \(1,\)"):
        cross_entropy_grad(logits, targets, row, row, row[:1])


def test_compiled_and_faked_calls_go_through_the_operators() -> None:
    logits, targets = batch(4, 6, torch.float32, "cpu")
    row = torch.zeros(4)
    check_operator("cross_entropy_statistics_", logits, targets, 0, torch.zeros(3, 4))
    for source in (None, logits):
        check_operator("cross_entropy_grad_", torch.randn(4, 6), source, targets, row, row, row, 0, -100)


SHIFTED = pytest.mark.parametrize("shifted", [False, True])


@X_TYPES
@SHIFTED
def test_statistics_compile_for_hopper_with_wide_loads(x_type: str, shifted: bool) -> None:
    tile = module.tile("cross_entropy_statistics", DTYPE_OF[x_type], 128256)
    types = {
        "logits_ptr": f"*{x_type}",
        "targets_ptr": "*i64",
        "out_ptr": "*fp32",
        "tokens cols first": "i32",
    }
    constants = {"VECTOR": VECTOR[x_type], "IS_SHIFTED": shifted}
    aligned = ["tokens", "first"] if shifted else ["tokens", "first", "cols"]
    kernel = "cross_entropy._statistics_kernel"
    compiled = compile_for_hopper(kernel, types, constants, tile=tile, aligned=aligned)
    assert compiled.registers <= 64
    assert "ld.global.v4.b32" in compiled.ptx
    # One exponential per element, and one for each vector; the rest are at the row's end.
    assert compiled.count("ex2.approx.ftz") <= compiled.elements + 2 * (compiled.elements // 4)
    # Neighbours are compared in the thread that loaded them: only the row's end crosses warps.
    assert compiled.count("shfl.sync") <= 30


@X_TYPES
@SHIFTED
def test_the_gradient_compiles_for_hopper_with_wide_accesses(x_type: str, shifted: bool) -> None:
    tile = module.tile("cross_entropy_grad", DTYPE_OF[x_type], 128256)
    types = {"out_ptr logits_ptr": f"*{x_type}", "targets_ptr": "*i64"}
    types |= {"largest_ptr log_sum_ptr scale_ptr": "*fp32", "cols first ignore_index across": "i32"}
    constants = {"VECTOR": VECTOR[x_type], "IS_SHIFTED": shifted}
    aligned = ["first"] if shifted else ["first", "cols"]
    compiled = compile_for_hopper("cross_entropy._grad_kernel", types, constants, tile=tile, aligned=aligned)
    assert compiled.registers <= 80
    vectors = compiled.elements // VECTOR[x_type]
    assert compiled.count("ld.global.v4.b32") == compiled.count("st.global.v4.b32") == vectors
