"""How the step benchmark sorts a GPU's time."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def helpers(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("_breakdown")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "communication"),
        ("nvjet_sm90_qqtst_128x256_128x6_1x2_h_bz_coopA_NNT", "GEMM"),
        ("void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x<...>>", "GEMM"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float, ...>", "GEMM"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_7_64x128x128", "attention"),
        ("void cudnn::fusion::compute_dot_do_o_specialized<true, ...>", "attention"),
        ("triton_red_fused__scaled_mm_abs_amax_clamp_mul_0", "memory-bound"),
        ("triton_tem_fused_mm_3", "GEMM"),
        ("_cast_many_kernel", "memory-bound"),
        ("Memcpy DtoD (Device -> Device)", "memory-bound"),
    ],
)
def test_class_of_a_kernel(helpers: ModuleType, name: str, expected: str) -> None:
    assert helpers.kernel_class(name) == expected


def test_overlapping_kernels_count_once(helpers: ModuleType) -> None:
    spans = [
        helpers.Span("nvjet", 0.0, 4000.0),
        helpers.Span("nvjet", 3000.0, 5000.0),
        helpers.Span("nccl", 1000.0, 7000.0),
        # Between 7 and 8 ms nothing runs.
        helpers.Span("cast", 8000.0, 9000.0),
    ]
    found = helpers.breakdown(spans, longest=2)
    assert found.step_ms == 9.0 and found.gaps_ms == 1.0 and found.overlap_ms == 4.0
    shares = {name: (share.busy_ms, share.alone_ms, share.kernels) for name, share in found.shares.items()}
    assert shares == {
        "GEMM": (5.0, 1.0, 2),
        "attention": (0.0, 0.0, 0),
        "memory-bound": (1.0, 1.0, 1),
        "communication": (6.0, 2.0, 1),
    }
    assert found.longest == [("GEMM", "nvjet", 6.0), ("communication", "nccl", 6.0)]


def test_without_kernels_there_is_nothing_to_say(helpers: ModuleType) -> None:
    assert helpers.breakdown([]) is None
