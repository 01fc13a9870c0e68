"""A layer that ranks share against the same layer on one process, and what it sends and computes in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Literal, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from flatfsdp.comm.collectives import Pending
from flatfsdp.comm.ranks import Ranks
from flatfsdp.contract.tensor_parallel import part_of
from flatfsdp.fp8 import DelayedScaling, autocast
from flatfsdp.layers import LayerNormMLP, Linear
from flatfsdp.matmul import gemms
from flatfsdp.matmul.exchange import Exchange
from tests.support.plain_layers import error

SEQUENCE, BATCH = 16, 4
WIDTH, OUT, FFN, HEADS = 64, 96, 128, 8
TOKENS = SEQUENCE * BATCH
SHORT = DelayedScaling(amax_history_len=4)
COLUMN = partial(Linear, WIDTH, OUT, parallel_mode="column")
ROW = partial(Linear, WIDTH, OUT, parallel_mode="row")
MLP = partial(LayerNormMLP, WIDTH, FFN, set_parallel_mode=True)

Kind = Literal["column", "row", "both"]
"""What is split between layers without sequence parallelism: the output, the input, neither."""


class Pair(NamedTuple):
    """One layer twice, with equal parameters.

    Attributes:
        whole: of one process, on each rank.
        split: shared by the ranks.
        widths: of the whole input and output.
        sizes: of the parts of a split output.
    """

    whole: nn.Module
    split: nn.Module
    kind: Kind
    widths: tuple[int, int]
    sequence_parallel: bool
    sizes: tuple[int, ...] | None

    def rows(self, whole: Tensor) -> Tensor:
        """What a rank has of a tensor between layers."""
        return part_of(whole, 0, (len(whole),), world()) if self.sequence_parallel else whole

    def columns(self, whole: Tensor) -> Tensor:
        sizes = (whole.shape[-1],) if self.sizes is None else self.sizes
        return part_of(whole, whole.dim() - 1, sizes, world()).contiguous()

    def input(self, whole: Tensor) -> Tensor:
        return self.columns(whole) if self.kind == "row" else self.rows(whole)

    def output(self, whole: Tensor) -> Tensor:
        return self.columns(whole) if self.kind == "column" else self.rows(whole)


def world() -> Ranks:
    return Ranks.of(dist.group.WORLD)


def whole_group(sequence_parallel: bool = True) -> dict[str, Any]:
    return {"tp_group": dist.group.WORLD, "sequence_parallel": sequence_parallel}


def make_pair(
    make: Callable[..., nn.Module],
    kind: Kind,
    widths: tuple[int, int],
    sequence_parallel: bool,
    *,
    sizes: tuple[int, ...] | None = None,
    split_options: dict[str, Any] | None = None,
    **options: Any,
) -> Pair:
    """Checks that both begin with equal values, and gives them others, none of them 0 or 1.

    Args:
        options: of both layers;  split_options: of the one that is split.
    """
    torch.manual_seed(5)
    whole = make(**options)
    torch.manual_seed(5)
    group = {"tp_group": dist.group.WORLD, "sequence_parallel": sequence_parallel}
    split = make(**options, **group, **(split_options or {}))
    for (name, parameter), part in zip(whole.named_parameters(), split.parameters(), strict=True):
        assert torch.equal(mine(parameter.detach(), part), part), name
    with torch.no_grad():
        for parameter, part in zip(whole.parameters(), split.parameters(), strict=True):
            parameter.normal_(0.0, 0.3)
            if parameter.dim() == 1:
                parameter += 1
            part.copy_(mine(parameter, part))
    return Pair(whole, split, kind, widths, sequence_parallel, sizes)


def mine(whole: Tensor, parameter: nn.Parameter) -> Tensor:
    """What this rank has of a parameter, or of its gradient."""
    if not parameter.tensor_model_parallel:
        return whole
    return part_of(whole, parameter.partition_dim, parameter.partition_sizes, world())


def complete_grad(parameter: nn.Parameter) -> Tensor:
    """The sum over ranks where each has a part of it."""
    grad = getattr(parameter, "main_grad", None)
    grad = parameter.grad if grad is None else grad
    assert grad is not None
    grad = grad.float().clone()
    if parameter.sequence_parallel:
        dist.all_reduce(grad)
    return grad


def step(layer: nn.Module, x: Tensor, dy: Tensor, recipe: Any, **arguments: Any) -> tuple[Tensor, Tensor]:
    """Output and input's gradient."""
    x = x.detach().clone().requires_grad_()
    with autocast(enabled=recipe is not None, recipe=recipe):
        out = layer(x, **arguments)
    out.backward(dy)
    assert x.grad is not None
    return out.detach(), x.grad


def assert_close(ours: Tensor, exact: Tensor, tolerance: float, what: str) -> None:
    difference = _difference(ours, exact, tolerance, what)
    assert difference is None, difference


def assert_all_close(checks: Sequence[tuple[Tensor, Tensor, float, str]]) -> None:
    """Fails on every rank if it does on one, which the others would wait for in their next collective."""
    differences = [found for check in checks if (found := _difference(*check)) is not None]
    number = torch.tensor(len(differences), device=checks[0][0].device)
    dist.all_reduce(number)
    assert number == 0, differences or "other ranks find differences"


def _difference(ours: Tensor, exact: Tensor, tolerance: float, what: str) -> str | None:
    if ours.shape != exact.shape:
        return f"{what}: shape {tuple(ours.shape)}, not {tuple(exact.shape)}"
    off = error(ours, exact)
    return None if off <= tolerance else f"{what}: relative error {off:.2e}"


def compare(
    pair: Pair,
    recipe: Any = None,
    *,
    steps: int = 1,
    tolerance: float = 1e-6,
    grad_tolerance: float = 1e-5,
    **arguments: Any,
) -> None:
    """Output and gradients of the split layer are this rank's part of the whole one's, in each step."""
    generator = torch.Generator().manual_seed(9)
    for count in range(steps):
        like = next(pair.whole.parameters())
        x = torch.randn(SEQUENCE, BATCH, pair.widths[0], generator=generator) * 2.0**count
        dy = torch.randn(SEQUENCE, BATCH, pair.widths[1], generator=generator)
        # Ranks have numbers of different sizes, and scale them alike.
        for whole in (x, dy):
            whole[SEQUENCE // 2 :] *= 5.0
        x, dy = x.to(like), dy.to(like)
        pair.whole.zero_grad()
        pair.split.zero_grad()
        out, dx = step(pair.whole, x, dy, recipe, **arguments)
        own_out, own_dx = step(pair.split, pair.input(x), pair.output(dy), recipe, **arguments)
        checks = [
            (own_out, pair.output(out), tolerance, "output"),
            (own_dx, pair.input(dx), grad_tolerance, "gradient of the input"),
        ]
        for (name, whole), part in zip(pair.whole.named_parameters(), pair.split.parameters(), strict=True):
            assert (whole.grad is None) == (part.grad is None) == (not whole.requires_grad), name
            if whole.grad is not None:
                checks.append((complete_grad(part), mine(whole.grad, part).float(), grad_tolerance, name))
        assert_all_close(checks)


@contextmanager
def events() -> Iterator[list[str]]:
    """Names of products and of what is sent, in order; a wait begins with "wait"."""
    log: list[str] = []
    started: dict[int, str] = {}

    def noting(owner: Any, name: str, label: str) -> Any:
        original = getattr(owner, name)

        def noted(*args: Any, **kwargs: Any) -> Any:
            log.append(label)
            result = original(*args, **kwargs)
            if isinstance(result, Pending):
                started[id(result.tensor)] = label
            return result

        return mock.patch.object(owner, name, noted)

    wait = Pending.wait

    def noted_wait(pending: Pending) -> Tensor:
        if pending.work is not None:
            log.append(f"wait {started[id(pending.tensor)]}")
        return wait(pending)

    with ExitStack() as stack:
        for name in ("fprop", "dgrad", "wgrad"):
            stack.enter_context(noting(gemms, name, name))
        stack.enter_context(noting(Exchange, "start_gather", "gather"))
        stack.enter_context(noting(Exchange, "start_sum", "sum"))
        stack.enter_context(mock.patch.object(Pending, "wait", noted_wait))
        yield log
