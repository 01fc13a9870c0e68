"""Classification and drawing of a profiled step."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from matplotlib.figure import Figure
from torch.profiler import ProfilerActivity, profile

from examples.timeline import (
    collective_kind,
    cpu_spans_of,
    draw_timeline,
    intersection,
    length,
    load_spans,
    overlap_of,
    redraw,
    save_spans,
    spans_in,
)
from flatfsdp.profiling.step_time import Interval, Span, breakdown, kernel_class, union


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
        ("Memcpy PtoP (Device -> Device)", "communication"),
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
    draw_timeline(spans, tmp_path / "step.png", "one product")
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("name", "group", "expected"),
    [
        ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(...)", "", "reduce-scatter"),
        ("ncclDevKernel_AllGather_RING_LL(...)", "", "all-gather"),
        ("ncclDevKernel_AllGather_RING_LL(...)", "TP", "TP all-gather"),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(...)", "TP", "TP all-reduce"),
        ("ncclDevKernel_SendRecv(...)", "", "send/recv"),
        ("gloo:send", "", "send/recv"),
        ("c10d::_allgather_base_", "", "all-gather"),
        ("Memcpy PtoP (Device -> Device)", "", "copy between GPUs"),
        ("c10d::symmetric_memory::barrier_kernel(unsigned int**, ...)", "", "barrier"),
        ("c10d::alltoall_base_", "", "other"),
    ],
)
def test_kind_of_a_collective(name: str, group: str, expected: str) -> None:
    assert collective_kind(Span(name, 0.0, 1.0, group=group)) == expected


def step_with_overlap() -> list[Span]:
    """Compute 0-5 and 7-9 ms; gathers 1-3 (twice at once) and 6-8, a reduction 8-10."""
    return [
        Span("nvjet", 1000.0, 6000.0, 7),
        Span("cast", 8000.0, 10000.0, 7),
        Span("ncclDevKernel_AllGather", 2000.0, 4000.0, 20, "TP"),
        Span("ncclDevKernel_AllGather", 3000.0, 4000.0, 21, "TP"),
        Span("ncclDevKernel_AllGather", 7000.0, 9000.0, 20, "TP"),
        Span("ncclDevKernel_ReduceScatter", 9000.0, 11000.0, 22),
    ]


def test_overlap_by_kind() -> None:
    found = overlap_of(step_with_overlap())
    assert (found.begin, found.end) == (1000.0, 11000.0)
    gathers, reductions = found.tracks
    assert (gathers.kind, reductions.kind) == ("TP all-gather", "reduce-scatter")
    assert gathers.busy == [(2000.0, 4000.0), (7000.0, 9000.0)]
    assert gathers.under == [(2000.0, 4000.0), (8000.0, 9000.0)]
    assert reductions.under == [(9000.0, 10000.0)]
    # Gather and reduction follow each other without a gap.
    assert found.everything.busy == [(2000.0, 4000.0), (7000.0, 11000.0)]
    assert found.hidden_share == 4 / 6
    assert overlap_of(step_with_overlap()[:2]).hidden_share is None


def test_intervals() -> None:
    generator = torch.Generator().manual_seed(3)
    starts = torch.randint(100, (2, 40), generator=generator).tolist()
    first, second = (union(Interval(start, start + 1 + start % 3) for start in found) for found in starts)
    # Every interval has whole numbers, so counting those is exact.
    inside = [{x for start, end in found for x in range(start, end)} for found in (first, second)]
    assert inside[0] == {x for start in starts[0] for x in range(start, start + 1 + start % 3)}
    assert all(a.end < b.start for a, b in pairwise(first))
    common = intersection(first, second)
    assert {x for start, end in common for x in range(start, end)} == inside[0] & inside[1]
    assert length(common) == len(inside[0] & inside[1])


def test_a_picture_says_what_was_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *args, **kwargs: figures.append(figure))
    draw_timeline(step_with_overlap(), tmp_path / "step.png", "tp 2")
    axes, closer = figures[0].axes
    title = axes.get_title("left")
    assert title == "tp 2\n67% of communication time under computation (communication 6.0 ms of 10.0 ms)"
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels == ["compute", "TP all-gather\n4.0 ms, 75% under", "reduce-scatter\n2.0 ms, 50% under"]
    assert axes.get_xlim() == (0.0, 10.0)
    # Half a millisecond, a twentieth of the step, all of it under the first GEMM.
    assert closer.get_xlim() == (1.0, 1.5)
    legend = [text.get_text() for text in figures[0].legends[0].get_texts()]
    assert legend == [
        *("GEMM", "memory-bound", "communication under computation", "communication alone", "both run")
    ]


def test_it_is_drawn_again_from_what_was_kept(tmp_path: Path) -> None:
    save_spans(step_with_overlap(), tmp_path / "step.json", "tp 2")
    spans, title = load_spans(tmp_path / "step.json")
    assert title == "tp 2"
    assert spans == [
        span._replace(start=span.start - 1000, end=span.end - 1000) for span in step_with_overlap()
    ]
    assert redraw(tmp_path / "step.json") == tmp_path / "step.png"
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")


def test_spans_in_a_chrome_trace(tmp_path: Path) -> None:
    gather = {"stream": 20, "Collective name": "_allgather_base", "Process Group Name": "17"}
    events = [
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 1.0, "dur": 9.0, "args": {}},
        {"ph": "X", "cat": "kernel", "name": "nvjet", "ts": 2.5, "dur": 4.0, "args": {"stream": 7}},
        {"ph": "X", "cat": "kernel", "name": "ncclDevKernel_AllGather", "ts": 3, "dur": 1, "args": gather},
        {"ph": "X", "cat": "gpu_user_annotation", "name": "step", "ts": 0, "dur": 9, "args": {"stream": 7}},
        {"ph": "X", "cat": "gpu_memset", "name": "Memset (Device)", "ts": 7, "dur": 1, "args": {"stream": 7}},
    ]
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": events}))
    assert spans_in(tmp_path / "trace.json", {"17": "TP"}) == [
        Span("nvjet", 2.5, 6.5, 7),
        Span("ncclDevKernel_AllGather", 3.0, 4.0, 20, "TP"),
        Span("Memset (Device)", 7.0, 8.0, 7),
    ]


def test_no_spans_are_no_picture(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing to draw"):
        draw_timeline([], tmp_path / "step.png", "nothing")
