"""Translations of fairscale's constructor arguments, and their completeness."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import nn

from flatfsdp.compat.fairscale import FSDP, ProcessGroupName
from flatfsdp.compat.fairscale.fairscale_options import (
    choose_cpu_offload,
    choose_precision,
    default_predivide_factor,
    mean_is_the_same,
)
from flatfsdp.options import Precision
from tests.support.assertions import assert_raises

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


def precision(dtype: torch.dtype, **arguments: Any) -> Precision:
    defaults = {
        "mixed_precision": False,
        "compute_dtype": None,
        "buffer_dtype": None,
        "fp32_reduce_scatter": False,
    }
    return choose_precision({"w": torch.zeros(1, dtype=dtype)}, **{**defaults, **arguments})


def test_full_precision() -> None:
    expected = Precision(FP32, FP32, FP32, FP32, grad=FP32, buffer=FP32)
    assert precision(FP32) == precision(FP32, fp32_reduce_scatter=True) == expected


def test_mixed_precision_keeps_fp32_shards() -> None:
    assert precision(FP32, mixed_precision=True) == Precision(FP32, FP16, FP16, FP16, buffer=FP16)
    found = precision(
        FP32, mixed_precision=True, compute_dtype=BF16, fp32_reduce_scatter=True, buffer_dtype=FP32
    )
    assert found == Precision(FP32, BF16, FP32, FP32, buffer=FP32)


def test_narrow_parameters_with_fp32_gradients() -> None:
    assert precision(BF16) == Precision(BF16, BF16, BF16, BF16, grad=BF16, buffer=BF16)
    assert precision(BF16, fp32_reduce_scatter=True).grad == FP32


@pytest.mark.parametrize(
    ("dtype", "arguments", "message"),
    [
        (BF16, {"mixed_precision": True}, "parameter w is torch.bfloat16"),
        (BF16, {"compute_dtype": FP32}, "pass mixed_precision=True"),
        (FP32, {"compute_dtype": FP16}, "pass mixed_precision=True"),
    ],
)
def test_dtypes_that_do_not_fit(dtype: torch.dtype, arguments: dict[str, Any], message: str) -> None:
    assert_raises(ValueError, message, precision, dtype, **arguments)


def test_a_unit_has_one_dtype() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).bfloat16())
    assert_raises(ValueError, r"0\.weight is torch\.float32, 1\.weight is torch\.bfloat16", FSDP, model)


@pytest.mark.parametrize(
    ("arguments", "error", "way_out"),
    [
        ({"flatten_parameters": False}, NotImplementedError, "param_groups"),
        ({"offload_config": object()}, NotImplementedError, "move_params_to_cpu"),
        ({"fp8_all_gather": True}, NotImplementedError, "FlatFSDP"),
        ({"move_params_to_cpu": True, "move_grads_to_cpu": False}, ValueError, "leave move_grads_to_cpu out"),
        ({"move_grads_to_cpu": True}, ValueError, "leave move_grads_to_cpu out"),
        ({"process_group_reduce_scatter": 3}, TypeError, "ProcessGroupName"),
    ],
)
def test_what_is_refused_names_the_way_out(
    arguments: dict[str, Any], error: type[Exception], way_out: str
) -> None:
    assert_raises(error, way_out, FSDP, nn.Linear(2, 2), **arguments)


class DummyProcessGroup:
    """Stands in for a group in programs that only build a model."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 2


@pytest.mark.parametrize("has_cuda", [False, True])
def test_a_stand_in_for_a_process_group_is_refused(monkeypatch: pytest.MonkeyPatch, has_cuda: bool) -> None:
    """It is refused before PyTorch is asked for its backend, which happens if there is a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)
    with pytest.raises(TypeError, match=r"a process group is needed, not .*DummyProcessGroup"):
        FSDP(nn.Linear(2, 2), DummyProcessGroup())  # type: ignore[arg-type]


def test_either_name_of_cpu_offload() -> None:
    assert choose_cpu_offload(True, False, None) and choose_cpu_offload(False, True, True)
    assert not choose_cpu_offload(False, False, False)


@pytest.mark.parametrize(
    "group", ["default", ProcessGroupName.default, ProcessGroupName.reduce_scatter, DummyProcessGroup()]
)
def test_groups_for_reductions_are_accepted(group: Any) -> None:
    assert FSDP(nn.Linear(2, 2), None, group).process_group_reduce_scatter is None


def test_default_factors() -> None:
    """At 6 ranks, for example, gradients are divided by 4 before and by 1.5 after their sum."""
    found = {n: default_predivide_factor(n) for n in (1, 2, 3, 4, 6, 8, 16, 64)}
    assert found == {1: 1, 2: 2, 3: 2, 4: 2, 6: 4, 8: 4, 16: 4, 64: 8}
    fairscale = pytest.importorskip("fairscale.nn.data_parallel").FullyShardedDataParallel
    for n in range(1, 130):
        assert default_predivide_factor(n) == fairscale._get_gradient_predivide_factor(None, n)


@pytest.mark.parametrize("ranks", range(1, 20))
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_the_mean_is_used_only_where_it_has_the_same_bits(ranks: int, dtype: torch.dtype) -> None:
    summed = torch.randn(1000).to(dtype)
    before = default_predivide_factor(ranks)
    same = torch.equal(summed / ranks, (summed / before) / (ranks / before))
    assert same or not mean_is_the_same(ranks, Precision(reduce=dtype))


def test_arguments_and_defaults_are_fairscales() -> None:
    theirs = pytest.importorskip("fairscale.nn.data_parallel").FullyShardedDataParallel
    expected = list(inspect.signature(theirs).parameters.values())
    found = list(inspect.signature(FSDP).parameters.values())[: len(expected)]
    assert [(p.name, p.default, p.kind) for p in found] == [(p.name, p.default, p.kind) for p in expected]
    public = {name for name in vars(theirs) if not name.startswith("_")}
    model = FSDP(nn.Linear(2, 2))
    assert {name for name in public if not hasattr(model, name)} == set()
