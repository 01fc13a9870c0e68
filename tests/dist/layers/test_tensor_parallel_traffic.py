"""Traffic of ranks that share a layer: what is sent, its bytes, and what it overlaps with."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from benchmarks.lib.copy_counter import CopyCounter
from flatfsdp.comm.collectives import start_all_gather, start_reduce_scatter
from flatfsdp.comm.ranks import Ranks
from flatfsdp.fp8 import CurrentScaling, autocast
from flatfsdp.fp8.quantizers import Blockwise, Current, Delayed, Unquantized
from flatfsdp.kernels.gemm.gemm import scaled_mm
from flatfsdp.layers import LayerNormLinear
from flatfsdp.matmul import overlapped
from flatfsdp.matmul.exchange import Exchange
from flatfsdp.matmul.linear_map import RowsUnderWay
from tests.support.ranks import on_ranks
from tests.support.split_layers import (
    BATCH,
    COLUMN,
    MLP,
    OUT,
    ROW,
    SEQUENCE,
    SHORT,
    TOKENS,
    WIDTH,
    compare,
    events,
    make_pair,
    whole_group,
    world,
)


def sent_bytes(make: Callable[..., nn.Module], width: int, recipe: Any) -> list[tuple[str, int]]:
    """Collectives of one forward and backward in bf16, without those of scales."""
    layer = make(params_dtype=torch.bfloat16, **whole_group())
    x = torch.randn(SEQUENCE // 2, BATCH, width, dtype=torch.bfloat16, requires_grad=True)
    with CopyCounter(min_numel=1) as counter:
        with autocast(enabled=recipe is not None, recipe=recipe):
            out = layer(x)
        out.sum().backward()
    return [(c.name, c.payload) for c in counter.collectives if c.name not in ("all_reduce", "identity")]


@on_ranks(2)
def test_an_fp8_gather_sends_one_byte_an_element() -> None:
    for recipe, size in ((None, 2), (SHORT, 1), (CurrentScaling(), 1)):
        inside = [("all_gather", size * TOKENS * WIDTH), ("reduce_scatter", 2 * TOKENS * WIDTH)]
        again = [("all_gather", size * TOKENS * WIDTH)]
        column = [inside[0], again[0], inside[1]]
        assert sent_bytes(COLUMN, WIDTH, recipe) == column
        assert (
            sent_bytes(partial(LayerNormLinear, WIDTH, OUT, parallel_mode="column"), WIDTH, recipe) == column
        )
        # x gathered, y scattered; dy gathered, x gathered again, dx scattered.
        assert sent_bytes(MLP, WIDTH, recipe) == [*inside, *again, *again, inside[1]]


@on_ranks(2)
def test_rows_that_are_cast_and_gathered_have_the_bits_of_gathered_rows_that_are_cast(
    rank: int, world_size: int
) -> None:
    """With the largest number on the last rank alone."""
    torch.manual_seed(0)
    whole = torch.randn(TOKENS, WIDTH)
    whole[-1, 3] = 1000.0
    rows = whole.chunk(world_size)[rank].clone()
    exchange = Exchange(world(), "column", sequence_parallel=True)
    scale = torch.full((1,), 0.25)
    for quantizer in (
        Unquantized(),
        Delayed(torch.float8_e4m3fn, scale, 1 / scale, None),
        Current(torch.float8_e4m3fn, 0.0, True),
        Current(torch.float8_e5m2, 0.0, False),
        Blockwise("1x128", True),
    ):
        part = quantizer.for_rows(exchange.ranks).cast(rows, rowwise=True, columnwise=False).operand
        forms = {"rowwise": True, "columnwise": True}
        gathered = RowsUnderWay.start(part, quantizer, exchange).wait(**forms)
        expected = quantizer.cast(whole, **forms).operand
        for ours, theirs in zip(gathered, expected, strict=True):
            assert (ours is None) == (theirs is None)
            if ours is not None and theirs is not None:
                assert ours.dtype == theirs.dtype
                assert torch.equal(ours.float(), theirs.float()), quantizer


@on_ranks(2)
def test_backward_multiplies_while_things_are_sent() -> None:
    def noted(
        make: Callable[..., nn.Module], width: int, sequence_parallel: bool
    ) -> tuple[list[str], list[str]]:
        layer = make(**whole_group(sequence_parallel))
        x = torch.randn(SEQUENCE // 2, BATCH, width, requires_grad=True)
        with events() as log:
            out = layer(x)
            forward = list(log)
            log.clear()
            out.sum().backward()
        return forward, log

    assert noted(COLUMN, WIDTH, True) == (
        ["gather", "wait gather", "fprop"],
        ["gather", "dgrad", "sum", "wait gather", "wgrad", "wait sum"],
    )
    assert noted(COLUMN, WIDTH, False) == (["fprop"], ["dgrad", "sum", "wgrad", "wait sum"])
    assert noted(ROW, WIDTH // 2, True) == (
        ["fprop", "sum", "wait sum"],
        ["gather", "wait gather", "dgrad", "wgrad"],
    )
    assert noted(ROW, WIDTH // 2, False) == (["fprop", "sum", "wait sum"], ["dgrad", "wgrad"])
    # A recomputation keeps what it gathers.
    _, backward = noted(partial(MLP, checkpoint=True), WIDTH, True)
    assert backward.count("gather") == 2 and backward.count("sum") == 1


class InOrder:
    """PyTorch's operators, which exist on GPUs only, without any overlap.

    Attributes:
        calls: names.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self.calls: list[str] = []

    def fused_all_gather_matmul(self, a: Tensor, bs: list[Tensor], dim: int, group: str) -> Any:
        self._note("gather", dim, group)
        whole = start_all_gather(a, self._ranks).wait()
        return whole, [whole @ b for b in bs]

    def fused_all_gather_scaled_matmul(
        self,
        a: Tensor,
        bs: list[Tensor],
        a_inv: Tensor,
        b_invs: list[Tensor],
        dim: int,
        group: str,
        biases: list[Tensor | None],
        result_scales: list[Tensor | None],
        dtypes: list[torch.dtype],
        fast: list[bool],
    ) -> Any:
        self._note("gather scaled", dim, group)
        whole = start_all_gather(a, self._ranks).wait()
        (b,), (b_inv,), (bias,), (dtype,), (is_fast,) = bs, b_invs, biases, dtypes, fast
        assert result_scales == [None]
        product = scaled_mm(
            whole, b.t(), a_inv, b_inv, bias=bias, out_dtype=dtype, split_accumulator=not is_fast
        )
        return whole, [product]

    def fused_matmul_reduce_scatter(self, a: Tensor, b: Tensor, op: str, dim: int, group: str) -> Tensor:
        self._note("scatter", dim, group)
        assert op == "sum"
        return start_reduce_scatter(a @ b, self._ranks).wait()

    def fused_scaled_matmul_reduce_scatter(
        self,
        a: Tensor,
        b: Tensor,
        a_inv: Tensor,
        b_inv: Tensor,
        op: str,
        dim: int,
        dim_of_matrix: int,
        group: str,
        shape: list[int],
        *,
        out_dtype: torch.dtype,
        use_fast_accum: bool,
    ) -> Tensor:
        self._note("scatter scaled", dim, group)
        assert (op, dim_of_matrix, shape) == ("sum", 0, [a.shape[0], b.shape[1]])
        product = scaled_mm(
            a, b.t(), a_inv, b_inv, bias=None, out_dtype=out_dtype, split_accumulator=not use_fast_accum
        )
        return start_reduce_scatter(product, self._ranks).wait()

    def _note(self, call: str, dim: int, group: str) -> None:
        assert (dim, group) == (0, self._ranks.name)
        self.calls.append(call)


@on_ranks(2)
def test_overlapped_products() -> None:
    operators = InOrder(world())
    with (
        mock.patch.object(overlapped, "is_available", return_value=True),
        mock.patch.object(overlapped, "_ops", return_value=operators),
    ):
        for make, kind, width in (
            (COLUMN, "column", OUT),
            (ROW, "row", OUT),
            (MLP, "both", WIDTH),
            (partial(MLP, checkpoint=True), "both", WIDTH),
        ):
            for recipe in (None, SHORT):
                pair = make_pair(make, kind, (WIDTH, width), True, split_options={"tp_overlap": True})
                operators.calls.clear()
                compare(pair, recipe, tolerance=1e-3, grad_tolerance=2e-3)
                kinds = {"column": ["gather"], "row": ["scatter", "gather"]}
                expected = kinds.get(kind, ["gather", "scatter", "gather"])
                if kind == "both" and make is not MLP:
                    # Once more, in backward.
                    expected = ["gather", "scatter", "gather", "gather"]
                suffix = "" if recipe is None else " scaled"
                assert operators.calls == [call + suffix for call in expected]
