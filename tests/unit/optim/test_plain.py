"""`flatfsdp.optim` over ordinary parameters and over a shard that an engine would have, in one process."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatfsdp import Precision, shard
from flatfsdp.comm.checking.identity import Action
from flatfsdp.comm.grid import Grid
from flatfsdp.comm.ranks import Ranks
from flatfsdp.fp8 import CurrentScaling, autocast
from flatfsdp.layers import Linear
from flatfsdp.optim import SGD, AdamW

SHAPES = [(7, 5), (33,), (), (2, 3, 4)]
ADAMW = {"lr": 3e-3, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.1}
SGDS = [
    {"weight_decay": 0.01},
    {"momentum": 0.9, "dampening": 0.2},
    {"momentum": 0.9, "weight_decay": 0.01, "nesterov": True},
]


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(shape).to(dtype)) for shape in SHAPES]


def copies(ours: Sequence[Tensor], dtype: torch.dtype | None = None) -> list[nn.Parameter]:
    return [nn.Parameter(p.detach().clone().to(dtype or p.dtype)) for p in ours]


def set_grads(*models: Sequence[Tensor]) -> None:
    """The same new gradients, each in the dtype of its parameter."""
    for tied in zip(*models, strict=True):
        grad = torch.randn(tied[0].shape)
        for parameter in tied:
            parameter.grad = grad.to(parameter.dtype, copy=True)


def steps(count: int, *trained: tuple[Sequence[Tensor], torch.optim.Optimizer]) -> None:
    """Steps of each optimizer over its parameters, with the same new gradients."""
    for _ in range(count):
        set_grads(*(parameters for parameters, _ in trained))
        for _, optimizer in trained:
            optimizer.step()


def equal(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def state_of(optimizer: torch.optim.Optimizer, ours: Sequence[Tensor]) -> list[Tensor]:
    return [value for p in ours for value in optimizer.state[p].values()]


def check_one_rounding(value: Tensor, exact: Tensor, change: Tensor) -> None:
    """Half a unit in the last place, and a little for the change, which is much smaller than the value."""
    unit = torch.nextafter(value.abs(), torch.tensor(torch.inf)).double() - value.abs().double()
    assert torch.all((value.double() - exact).abs() <= 0.5 * unit + 1e-6 * change.abs())


class Shard:
    """A shard as an engine has it: one rank, one bf16 copy, amaxes of two parts."""

    def __init__(self, parameter: Tensor, runs: Sequence[tuple[int, int]], has_copy: bool = True) -> None:
        alone = Ranks.of(None)
        self.grid, self.device, self.rounding = Grid(alone, alone), parameter.device, torch.bfloat16
        self.stages, self.is_counted, self.moved, self.pieces = alone, True, None, None
        self.compute = torch.full(parameter.shape, torch.nan, dtype=torch.bfloat16) if has_copy else None
        self.amaxes = [torch.full((1,), torch.nan) for _ in runs]
        self.done: list[int] = []
        self._parameter, self._runs = parameter, runs
        parameter.flat_shard = self

    def identify(self, _action: Action) -> None:
        return None

    def runs(self) -> list[tuple[int, int, Tensor]]:
        return [(*run, amax.zero_()) for run, amax in zip(self._runs, self.amaxes, strict=True)]

    def cast_done(self) -> None:
        self.done.append(self._parameter._version)

    def check_cast(self) -> None:
        """The copy and the amaxes are of the parameter's values as they are."""
        rounded = self._parameter.detach().bfloat16()
        assert torch.equal(self.compute, rounded)
        for (start, stop), amax in zip(self._runs, self.amaxes, strict=True):
            assert amax == rounded[start:stop].abs().max()


# ---- the step -------------------------------------------------------------------------------------------


def test_a_step_of_adamw_rounds_the_parameter_once() -> None:
    """Against torch.optim.AdamW in FP64, from the same state, for a few steps."""
    # Of some other numbers the change is large beside the value, and its own rounding counts.
    torch.manual_seed(0)
    ours = parameters()
    optimizer = AdamW(ours, **ADAMW)
    for _ in range(5):
        before = copies(ours, torch.float64)
        exact = copies(before)
        reference = torch.optim.AdamW(exact, **ADAMW)
        reference.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        steps(1, (ours, optimizer), (exact, reference))
        for value, right, old in zip(ours, exact, before, strict=True):
            check_one_rounding(value.detach(), right.detach(), (right - old).detach())


def test_a_hundred_steps_of_adamw_against_float64() -> None:
    ours = [nn.Parameter(torch.randn(2000))]
    exact = copies(ours, torch.float64)
    optimizer, reference = AdamW(ours, **ADAMW), torch.optim.AdamW(exact, **ADAMW)
    steps(100, (ours, optimizer), (exact, reference))
    (value,), (right,) = ours, exact
    assert (value - right).norm() <= 1e-6 * right.norm()
    for name in ("exp_avg", "exp_avg_sq"):
        moment, exact_moment = optimizer.state[value][name], reference.state[right][name]
        assert (moment - exact_moment).norm() <= 1e-6 * exact_moment.norm()


@pytest.mark.parametrize("options", SGDS, ids=str)
def test_sgd_against_float64(options: dict[str, Any]) -> None:
    ours = parameters()
    exact = copies(ours, torch.float64)
    optimizer, reference = SGD(ours, lr=0.1, **options), torch.optim.SGD(exact, lr=0.1, **options)
    steps(20, (ours, optimizer), (exact, reference))
    torch.testing.assert_close(copies(ours, torch.float64), exact, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", [AdamW, SGD])
def test_clipping_in_the_step_is_clipping_before_it(kind: Any) -> None:
    """The same bits: both multiply an FP32 gradient by the same number, and round it."""
    ours = parameters()
    apart = copies(ours)
    optimizer, plain = kind(ours, lr=0.1, max_grad_norm=0.5), kind(apart, lr=0.1)
    assert optimizer.grad_norm is None
    for factor in (1.0, 1e-3):  # the second norm is below the limit
        set_grads(ours, apart)
        for parameter in (*ours, *apart):
            parameter.grad.mul_(factor)
        before = [p.grad.clone() for p in ours]
        norm = nn.utils.clip_grad_norm_(apart, 0.5)
        optimizer.step()
        plain.step()
        assert optimizer.grad_norm is not None and torch.equal(optimizer.grad_norm, norm)
        assert equal(ours, apart)
        assert equal([p.grad for p in ours], before), "gradients are only read"


# ---- what it is given -----------------------------------------------------------------------------------


def test_a_shard_gets_its_copy_and_its_amaxes() -> None:
    flat, plain = nn.Parameter(torch.randn(96)), nn.Parameter(torch.randn(96))
    plain.data.copy_(flat.data)
    shard = Shard(flat, [(16, 32), (48, 91)])
    ours, theirs = AdamW([flat]), AdamW([plain])
    for _ in range(2):
        set_grads([flat], [plain])
        version = flat._version
        ours.step()
        theirs.step()
        assert torch.equal(flat, plain), "runs do not change the values"
        assert shard.done[-1] == flat._version > version
        shard.check_cast()
    assert len(shard.done) == 2


def test_a_shard_without_a_gradient_is_left_alone() -> None:
    flat, other = nn.Parameter(torch.randn(32)), nn.Parameter(torch.randn(32))
    shards = [Shard(flat, [(0, 32)]), Shard(other, [], has_copy=False)]
    optimizer = AdamW([flat, other], max_grad_norm=1.0)
    other.grad = torch.randn(32)
    before, version = flat.detach().clone(), flat._version
    optimizer.step()
    assert torch.equal(flat, before) and flat._version == version and flat not in optimizer.state
    assert [len(shard.done) for shard in shards] == [0, 1]
    assert shards[0].compute.isnan().all() and shards[0].amaxes[0].isnan()


def test_runs_that_overlap_are_refused() -> None:
    flat = nn.Parameter(torch.randn(64))
    Shard(flat, [(0, 32), (16, 64)])
    flat.grad = torch.randn(64)
    with pytest.raises(ValueError, match=r"run \[16, 64\) begins before 32"):
        AdamW([flat]).step()


def test_main_grad_comes_before_grad_and_is_zeroed() -> None:
    ours = parameters()
    apart = copies(ours)
    for parameter, plain in zip(ours, apart, strict=True):
        parameter.main_grad = torch.randn(parameter.shape).bfloat16()
        parameter.grad = torch.full_like(parameter, torch.nan)
        plain.grad = parameter.main_grad.float()
    optimizer, plain_optimizer = AdamW(ours), AdamW(apart)
    optimizer.step()
    plain_optimizer.step()
    assert equal(ours, apart)
    kept = [parameter.main_grad for parameter in ours]
    optimizer.zero_grad()
    # The buffers are somebody else's, who will add to them.
    assert all(p.main_grad is own and not own.any() for p, own in zip(ours, kept, strict=True))
    assert all(p.grad is None for p in ours)


def test_options_of_groups_and_a_scheduler() -> None:
    ours = parameters()
    exact = copies(ours, torch.float64)

    def groups(of: Sequence[Tensor]) -> list[dict[str, Any]]:
        return [{"params": of[:1]}, {"params": of[1:], "weight_decay": 0.0, "lr": 1e-2}]

    optimizers = [AdamW(groups(ours), **ADAMW), torch.optim.AdamW(groups(exact), **ADAMW)]
    schedulers = [torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)) for o in optimizers]
    for _ in range(4):
        set_grads(ours, exact)
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            optimizer.step()
            scheduler.step()
    torch.testing.assert_close(copies(ours, torch.float64), exact, rtol=1e-6, atol=1e-6)


def test_parameters_without_a_gradient_count_no_step() -> None:
    ours = parameters()
    optimizer = AdamW(ours, max_grad_norm=1.0)
    optimizer.step()
    assert not optimizer.state and optimizer.grad_norm == 0
    before = ours[1].detach().clone()
    set_grads(ours)
    ours[1].grad = None
    optimizer.step()
    set_grads(ours)
    ours[1].grad.zero_()
    optimizer.step()
    assert [int(optimizer.state[p]["step"]) for p in ours] == [2, 1, 2, 2]
    torch.testing.assert_close(ours[1].detach(), before * (1 - 1e-3 * 1e-2))


def test_parameters_of_other_dtypes_and_layouts() -> None:
    values = torch.randn(6, 8)
    ours = [
        nn.Parameter(values.bfloat16()),
        nn.Parameter(values.double()),
        nn.Parameter(values.clone().t()),
        nn.Parameter(values.clone()),
    ]
    exact = copies(ours, torch.float64)
    optimizer = AdamW(ours, **ADAMW, max_grad_norm=1.0)
    reference = torch.optim.AdamW(exact, **ADAMW)
    for _ in range(3):
        set_grads(ours)
        ours[3].grad = ours[3].grad.t().contiguous().t()
        for parameter, right in zip(ours, exact, strict=True):
            right.grad = parameter.grad.to(torch.float64, copy=True)
        nn.utils.clip_grad_norm_(exact, 1.0)
        optimizer.step()
        reference.step()
    for parameter, right, tolerance in zip(ours, exact, (2e-2, 1e-12, 1e-6, 1e-6), strict=True):
        torch.testing.assert_close(parameter.double(), right, rtol=tolerance, atol=tolerance)
        assert optimizer.state[parameter]["exp_avg"].dtype == parameter.dtype


def test_closure() -> None:
    (parameter,) = ours = [nn.Parameter(torch.ones(3))]
    optimizer = SGD(ours, lr=0.5)

    def closure() -> float:
        loss = parameter.square().sum()
        loss.backward()
        return loss.item()

    assert optimizer.step(closure) == 3.0
    assert torch.equal(parameter, torch.zeros(3))


# ---- its state ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [False, True])
def test_state_dicts_of_adamw_go_both_ways(fused: bool) -> None:
    theirs = parameters()
    peer = torch.optim.AdamW(theirs, **ADAMW, fused=fused)
    steps(3, (theirs, peer))
    ours = copies(theirs)
    optimizer = AdamW(ours, **ADAMW)
    optimizer.load_state_dict(copy.deepcopy(peer.state_dict()))
    assert equal(state_of(optimizer, ours), state_of(peer, theirs))
    steps(1, (ours, optimizer), (theirs, peer))
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
    peer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert equal(state_of(peer, theirs), state_of(optimizer, ours))
    steps(1, (theirs, peer))


def test_state_dicts_of_sgd_go_both_ways() -> None:
    ours = parameters()
    theirs = copies(ours)
    optimizer, peer = SGD(ours, momentum=0.9), torch.optim.SGD(theirs, momentum=0.9)
    set_grads(ours, theirs)
    optimizer.step()
    peer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert equal(state_of(peer, theirs), state_of(optimizer, ours))
    optimizer.load_state_dict(copy.deepcopy(peer.state_dict()))
    steps(1, (ours, optimizer))


def test_bf16_moments_train_like_fp32_ones() -> None:
    ours = [nn.Parameter(torch.randn(500))]
    exact = copies(ours)
    options: dict[str, Any] = {**ADAMW, "betas": (0.9, 0.95)}
    optimizer, wide = AdamW(ours, **options, moment_dtype=torch.bfloat16), AdamW(exact, **options)
    start = ours[0].detach().clone()
    steps(30, (ours, optimizer), (exact, wide))
    moved = (exact[0] - start).norm()
    assert (ours[0] - exact[0]).norm() < 0.02 * moved


# ---- what it refuses ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (AdamW, {"lr": -1.0}, "lr is -1.0"),
        (AdamW, {"eps": float("nan")}, "eps is nan"),
        (AdamW, {"weight_decay": -0.1}, r"weight_decay is -0\.1"),
        (AdamW, {"betas": (0.9, 1.0)}, r"betas are \(0\.9, 1\.0\)"),
        (AdamW, {"betas": (0.9,)}, r"betas are \(0\.9,\)"),
        (AdamW, {"max_grad_norm": 0.0}, r"max_grad_norm is 0\.0"),
        (AdamW, {"moment_dtype": torch.float16}, r"moment_dtype is torch\.float16"),
        (AdamW, {"moment_dtype": torch.bfloat16}, r"\(0\.9, 0\.999\).*at most 0\.99"),
        (SGD, {"momentum": -0.5}, r"momentum is -0\.5"),
        (SGD, {"nesterov": True}, r"nesterov needs momentum and no dampening, not 0\.0"),
        (SGD, {"nesterov": True, "momentum": 0.9, "dampening": 0.1}, r"no dampening, not 0\.9, 0\.1"),
    ],
)
def test_options_out_of_their_range(kind: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind(parameters(), **options)


def test_options_of_a_group_and_of_a_loaded_state_are_checked() -> None:
    ours = parameters()
    with pytest.raises(ValueError, match=r"lr is -2\.0"):
        AdamW([{"params": ours, "lr": -2.0}])
    with pytest.raises(ValueError, match=r"not torch\.complex64"):
        AdamW([nn.Parameter(torch.zeros(2, dtype=torch.complex64))])
    optimizer = AdamW(ours)
    peer = torch.optim.AdamW(copies(ours), amsgrad=True)
    with pytest.raises(ValueError, match="amsgrad=True"):
        optimizer.load_state_dict(peer.state_dict())
    assert optimizer.param_groups[0].get("amsgrad") is None


def test_gradients_that_do_not_fit_change_nothing() -> None:
    ours = parameters()
    before = copies(ours)
    optimizer = AdamW(ours)
    set_grads(ours)
    for wrong, message in (
        (torch.randn(32), r"\(33,\) on cpu has a gradient of shape \(32,\)"),
        (torch.randn(33).to_sparse(), "sparse"),
        (torch.ones(33, dtype=torch.int64), r"torch\.int64"),
        (torch.empty(33, device="meta"), "on meta"),
    ):
        ours[1].main_grad = wrong
        with pytest.raises(ValueError, match=message):
            optimizer.step()
    assert equal(ours, before) and not optimizer.state


def test_a_step_that_fails_leaves_the_scales_right() -> None:
    """It may have begun to measure the weights anew."""
    layers = nn.Sequential(Linear(32, 32), Linear(32, 32))
    precision = Precision(compute=torch.bfloat16, fp8_weights=CurrentScaling())
    model = shard(layers, precision=precision)
    optimizer = AdamW(model.parameters())
    x = torch.randn(16, 32)
    with autocast(recipe=CurrentScaling()):
        model(x).float().sum().backward()
        optimizer.step()
        for parameter in model.parameters():
            parameter.flat_shard.runs()
        out = model(x)
        for parameter in model.parameters():
            parameter.detach().mul_(1.0)
        assert torch.equal(out, model(x))


def test_a_state_that_is_empty() -> None:
    parameter = nn.Parameter(torch.ones(4))
    optimizer = AdamW([parameter])
    assert not optimizer.state[parameter]
    optimizer.load_state_dict(optimizer.state_dict())
    parameter.grad = torch.ones(4)
    optimizer.step()
    assert optimizer.state[parameter]["step"] == 1
