"""Steps whose gradients are not finite, in one process: refused, left out, or taken."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from flatfsdp import checkpoint, shard
from flatfsdp.optim import SGD, AdamW, NonFiniteGradientError
from flatfsdp.optim.clip import Awaited
from tests.unit.optim.test_plain import Shard, copies, equal, parameters, state_of

STEPS = 6
MAKES: dict[str, Callable[..., Any]] = {
    "AdamW": lambda p, **options: AdamW(p, lr=1e-2, **options),
    "AdamW bf16": lambda p, **options: AdamW(
        p, lr=1e-2, betas=(0.9, 0.95), moment_dtype=torch.bfloat16, **options
    ),
    "SGD": lambda p, **options: SGD(p, lr=0.1, weight_decay=0.01, **options),
    "momentum": lambda p, **options: SGD(p, lr=0.1, momentum=0.9, dampening=0.2, **options),
    "Nesterov": lambda p, **options: SGD(p, lr=0.1, momentum=0.9, nesterov=True, **options),
}
KINDS = pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)


def groups(of: Sequence[Tensor]) -> list[dict[str, Any]]:
    """With options of their own."""
    return [{"params": of[:2]}, {"params": of[2:], "lr": 0.5, "weight_decay": 0.2}]


def set_grads(of: Sequence[Tensor], step: int, bad: float | None = None) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in of:
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    if bad is not None:
        of[1].grad[3] = bad


def train(optimizer: Any, of: Sequence[Tensor], steps: Iterable[int], bad: dict[int, float]) -> list[int]:
    """The steps that were refused."""
    refused = []
    for step in steps:
        set_grads(of, step, bad.get(step))
        try:
            optimizer.step()
        except NonFiniteGradientError:
            refused.append(step)
    return refused


def without(bad: Iterable[int]) -> list[int]:
    return [step for step in range(STEPS) if step not in bad]


# ---- left out, refused, taken -----------------------------------------------------------------------------


@KINDS
@pytest.mark.parametrize("mode", ["skip", "raise"])
@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 0.5}], ids=["plain", "clipped"])
@pytest.mark.parametrize("where", [(0,), (3,), (0, 1, 5)], ids=str)
def test_the_step_is_as_if_it_had_not_been(make: Any, mode: Any, options: dict[str, Any], where: Any) -> None:
    ours = parameters()
    expected = copies(ours)
    optimizer = make(groups(ours), nonfinite=mode, **options)
    reference = make(groups(expected), **options)
    bad = dict(zip(where, (torch.nan, torch.inf, -torch.inf), strict=False))
    refused = train(optimizer, ours, range(STEPS), bad)
    train(reference, expected, without(where), {})
    assert refused == (list(where) if mode == "raise" else [])
    assert equal(ours, expected)
    assert equal(state_of(optimizer, ours), state_of(reference, expected))
    assert optimizer.grad_norm.isfinite() == (STEPS - 1 not in where)
    assert optimizer.skipped_steps == len(where) and reference.skipped_steps == 0
    assert optimizer.skipped_steps.dtype == torch.int64 and optimizer.skipped_steps.dim() == 0


@KINDS
def test_a_refusal_says_what_to_do_and_changes_nothing(make: Any) -> None:
    ours = parameters()
    before = copies(ours)
    optimizer = make(groups(ours))
    assert optimizer.nonfinite == "raise"
    set_grads(ours, 0, torch.inf)
    with pytest.raises(NonFiniteGradientError, match=r'norm was inf .* look for NaN.* nonfinite="skip"'):
        optimizer.step()
    assert equal(ours, before) and not any(optimizer.state.values())
    optimizer.raise_if_nonfinite()
    optimizer.state_dict()


@KINDS
def test_a_step_that_goes_on_anyway(make: Any) -> None:
    ours, clipped = parameters(), parameters()
    optimizer, clipping = make(ours, nonfinite="step"), make(clipped, nonfinite="step", max_grad_norm=1.0)
    set_grads(ours, 0, torch.nan)
    set_grads(clipped, 0, torch.nan)
    optimizer.step()
    clipping.step()
    assert [int(parameter.isnan().sum()) for parameter in ours] == [0, 1, 0, 0]
    assert optimizer.grad_norm is None and optimizer.skipped_steps == 0
    assert clipping.grad_norm.isnan() and all(parameter.isnan().all() for parameter in clipped)


def test_the_norm_is_known_without_clipping() -> None:
    ours = parameters()
    optimizer = AdamW(ours, nonfinite="skip")
    set_grads(ours, 0)
    optimizer.step()
    assert torch.equal(optimizer.grad_norm, nn.utils.get_total_norm([p.grad for p in ours]))


def test_other_dtypes_take_the_same_way() -> None:
    values = torch.randn(6, 8)
    ours = [
        nn.Parameter(values.bfloat16()),
        nn.Parameter(values.double()),
        nn.Parameter(values.t().clone().t()),
    ]
    expected = copies(ours)
    optimizer, reference = AdamW(ours, nonfinite="skip"), AdamW(expected)
    for step in range(3):
        set_grads(ours, step)
        if step == 1:
            ours[0].grad[2, 2] = torch.nan
        else:
            set_grads(expected, step)
            reference.step()
        optimizer.step()
    assert equal(ours, expected)
    assert equal(state_of(optimizer, ours), state_of(reference, expected))


def test_a_shard_is_written_as_it_is_and_settled_once() -> None:
    flat, other = nn.Parameter(torch.randn(96)), nn.Parameter(torch.randn(32))
    settled: list[float] = []

    class Moved:
        def settle(self, taken: Tensor, optimizer: torch.optim.Optimizer) -> None:
            settled.append(float(taken))

    shards = [Shard(flat, [(16, 32), (48, 91)]), Shard(other, [])]
    shards[0].moved = shards[1].moved = Moved()
    optimizer = AdamW([flat, other], nonfinite="skip")
    for step, bad in enumerate((torch.nan, None)):
        set_grads([other, flat], step, bad)
        optimizer.step()
        shards[0].check_cast()
    assert settled == [0.0, 1.0]
    optimizer.nonfinite = "step"
    optimizer.step()
    assert len(settled) == 2


class Recorded(TorchDispatchMode):
    """The names of all operators inside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@KINDS
@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
def test_a_step_fetches_no_number_to_the_host(make: Any, max_grad_norm: float | None) -> None:
    """Fetching would wait for a device; the number of operators does not depend on the parameters."""
    counts = []
    for copies_of_each in (1, 10):
        ours = [parameter for _ in range(copies_of_each) for parameter in parameters()]
        optimizer = make(groups(ours), nonfinite="skip", max_grad_norm=max_grad_norm)
        train(optimizer, ours, range(2), {})
        set_grads(ours, 2, torch.nan)
        with Recorded() as recorded:
            optimizer.step()
        fetched = [name for name in recorded.names if "local_scalar" in name or "nonzero" in name]
        assert fetched == [] and any("flatfsdp." in name for name in recorded.names)
        counts.append(sum("detach" not in name for name in recorded.names))
    assert counts[0] == counts[1] < 45


# ---- later, as a GPU says it ------------------------------------------------------------------------------


def late(optimizer: Any, worst: float = torch.nan) -> None:
    """Makes it as if a device had refused the step before, and the host had not heard of it yet."""
    optimizer._awaited = Awaited(torch.tensor(worst), True, None)


def test_a_late_refusal_comes_before_the_next_step_and_once() -> None:
    ours = parameters()
    optimizer = AdamW(ours)
    train(optimizer, ours, range(2), {})
    before = copies(ours)
    late(optimizer)
    set_grads(ours, 2)

    def closure() -> float:
        raise AssertionError("the step begins")

    with pytest.raises(NonFiniteGradientError):
        optimizer.step(closure)
    assert equal(ours, before)
    optimizer.step()
    assert not equal(ours, before)
    late(optimizer, 3.0)
    optimizer.step()


def test_whoever_reads_the_state_hears_of_a_late_refusal() -> None:
    model = shard(nn.Linear(4, 4))
    optimizer = AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    late(optimizer)
    for _ in range(2):
        # Ranks may ask for it alone, and raise together later.
        with pytest.raises(NonFiniteGradientError):
            optimizer.state_dict()
    with pytest.raises(NonFiniteGradientError):
        checkpoint.full_optimizer_state_dict(model, optimizer)
    checkpoint.full_optimizer_state_dict(model, optimizer)


def test_a_late_refusal_is_not_of_the_state_that_is_loaded_after_it() -> None:
    ours = parameters()
    optimizer = AdamW(ours)
    saved = copy.deepcopy(optimizer.state_dict())
    late(optimizer)
    optimizer.load_state_dict(saved)
    set_grads(ours, 0)
    optimizer.step()


# ---- what it is set to ------------------------------------------------------------------------------------


def test_the_choice_is_checked_and_may_change() -> None:
    ours = parameters()
    for kind in (AdamW, SGD):
        with pytest.raises(ValueError, match=r"nonfinite is 'ignore'; it must be \"raise\""):
            kind(ours, nonfinite="ignore")
    optimizer = AdamW(ours)
    with pytest.raises(ValueError, match="nonfinite is None"):
        optimizer.nonfinite = None
    for mode, refused in (("skip", []), ("raise", [0]), ("step", [])):
        optimizer.nonfinite = mode
        assert train(optimizer, ours, [0], {0: torch.nan}) == refused
    assert ours[1].isnan().any() and optimizer.skipped_steps == 2


@pytest.mark.parametrize(
    "way", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))], ids=["copy", "pickle"]
)
def test_copies_go_on_alike_and_state_dicts_hold_none_of_it(way: Any) -> None:
    ours = parameters()
    optimizer = AdamW(ours, nonfinite="skip")
    train(optimizer, ours, range(2), {1: torch.nan})
    assert optimizer.state_dict().keys() == {"state", "param_groups"}
    late(optimizer)
    again, copied = way((ours, optimizer))
    assert copied.nonfinite == "skip" and copied.skipped_steps == 1
    train(copied, again, range(2, 4), {2: torch.inf})
    assert copied.skipped_steps == 2 and optimizer.skipped_steps == 1


def test_a_momentum_of_pytorchs_has_had_its_first_step() -> None:
    """Its state counts no steps, and with dampening the first one is another one."""
    theirs = parameters()
    options = {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}
    peer = torch.optim.SGD(theirs, **options)
    for step in range(2):
        set_grads(theirs, step)
        peer.step()
    ours = copies(theirs)
    optimizer = SGD(ours, **options)
    optimizer.load_state_dict(copy.deepcopy(peer.state_dict()))
    for step in range(2, 4):
        set_grads(ours, step)
        set_grads(theirs, step)
        optimizer.step()
        peer.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


def test_a_loaded_count_is_a_copy_beside_the_parameter() -> None:
    ours = parameters()
    optimizer = AdamW(ours)
    train(optimizer, ours, range(2), {})
    saved = optimizer.state_dict()
    other = AdamW(copies(ours))
    other.load_state_dict(saved)
    train(optimizer, ours, [2], {})
    counts = {int(state["step"]) for state in other.state.values()}
    assert counts == {2} and all(state["step"].dtype == torch.float32 for state in other.state.values())
