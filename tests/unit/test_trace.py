"""How a profiled step is sorted and drawn."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from flatfsdp.timeline import draw_timeline
from flatfsdp.trace import Span, breakdown, cpu_spans_of, kernel_class


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
        ("aten::addmm", "GEMM"),
        ("aten::add", "memory-bound"),
        ("gloo:all_gather", "communication"),
        ("Memcpy DtoD (Device -> Device)", "memory-bound"),
    ],
)
def test_class_of_a_kernel(name: str, expected: str) -> None:
    assert kernel_class(name) == expected


def test_overlapping_kernels_count_once() -> None:
    spans = [
        Span("nvjet", 0.0, 4000.0),
        Span("nvjet", 3000.0, 5000.0),
        Span("nccl", 1000.0, 7000.0),
        # Between 7 and 8 ms nothing runs.
        Span("cast", 8000.0, 9000.0),
    ]
    found = breakdown(spans, longest=2)
    assert found.step_ms == 9.0 and found.gaps_ms == 1.0 and found.overlap_ms == 4.0
    shares = {name: (share.busy_ms, share.alone_ms, share.kernels) for name, share in found.shares.items()}
    assert shares == {
        "GEMM": (5.0, 1.0, 2),
        "attention": (0.0, 0.0, 0),
        "memory-bound": (1.0, 1.0, 1),
        "communication": (6.0, 2.0, 1),
    }
    assert found.longest == [("GEMM", "nvjet", 6.0), ("communication", "nccl", 6.0)]


def test_without_kernels_there_is_nothing_to_say() -> None:
    assert breakdown([]) is None


def test_operators_of_a_cpu_are_drawn(tmp_path: Path) -> None:
    x = torch.randn(32, 32)
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        (x @ x).relu()
    spans = cpu_spans_of(recorded)
    assert [span.name for span in spans] == ["aten::matmul", "aten::relu"]
    assert [kernel_class(span.name) for span in spans] == ["GEMM", "memory-bound"]
    draw_timeline(spans, tmp_path / "step.png", "one product", lane="thread")
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")


def test_no_spans_are_no_picture(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing to draw"):
        draw_timeline([], tmp_path / "step.png", "nothing")
