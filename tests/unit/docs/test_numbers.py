"""The tables of measurements in README.md and docs/ equal the committed results, digit by digit."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any

import pytest

from tests.support.programs import ROOT
from tests.support.published import results, rows
from tests.unit.docs.pages import DOCS, README, TEXT

SETUP = (ROOT / "setup.py").read_text()
PROSE = " ".join(TEXT.split())
ROWS = [
    [cell.strip() for cell in re.sub(r"[*`]", "", line).strip("|").split("|")]
    for line in TEXT.splitlines()
    if line.startswith("|")
]


@pytest.fixture
def headline(benchmarks: Callable[[str], ModuleType]) -> ModuleType:
    """The script that makes the README's table and chart."""
    return benchmarks("headline")


def assert_rows(expected: Iterable[tuple[str, ...]]) -> None:
    """Checks that each is the end of a row of some page."""
    missing = [cells for cells in expected if not any(row[-len(cells) :] == [*cells] for row in ROWS)]
    assert not missing, "\n".join(" | ".join(cells) for cells in missing)


def bytes_of_steps() -> Iterator[tuple[str, ...]]:
    by_label = {row["label"]: row["local"] for row in results("bytes.json")["rows"] if row["ranks"] == 4}
    for row in ("FlatFSDP on, {}, last", "FlatFSDP off, {}, last", "FSDP2, {}, last", "FSDP2, {}, every"):
        yield tuple(f"{by_label[row.format(zero)]['measured']:.1f}" for zero in ("ZeRO-3", "ZeRO-2"))


def the_same_bits() -> Iterator[tuple[str, ...]]:
    of_two, of_four = (results(f"verify-h200-{ranks}.json")["rows"] for ranks in (2, 4))
    for two, four in zip(of_two, of_four, strict=True):
        yield two["off"]["final_loss_hex"], four["on"]["final_loss_hex"], "equal"
    own: dict[tuple[str, str], dict[str, str]] = {}
    for row in results("verify-h200-2-fp8.json")["rows"]:
        losses = own.setdefault((row["switch"], row["fusion"]), {})
        on, off = (row[flag]["final_loss_hex"] for flag in ("on", "off"))
        # Both strategies have one loss.
        assert losses.setdefault(row["precision"], on) == off
    for losses in own.values():
        yield tuple(losses.get(name, "") for name in ("bf16-fused", "fp8-delayed", "fp8-current"))


def steps() -> Iterator[tuple[str, ...]]:
    for name, row in rows("step-70b-l2-vocab-m16-keep.json").items():
        if name != "flat-off-compile":
            yield f"{row['ms']:.0f}", f"{row['time_vs_fsdp2']:.3f}", f"{row['peak_gib']:.1f}"
    for file in ("step-8b-m1-reshard-fp8.json", "step-70b-l2-s1k-m16-keep-fp8.json"):
        for row in rows(file).values():
            numbers = f"{row['ms']:.0f}", f"{row['tflops_per_rank']:.0f}"
            yield *numbers, f"{row['time_vs_fsdp2_float8']:.3f}", f"{row['peak_gib']:.1f}"


def hugging_face_models() -> Iterator[tuple[str, ...]]:
    for row in rows("hf-1b-m8-reshard.json").values():
        host = "" if row["host_ms"] is None else f"{row['host_ms']:.1f}"
        yield f"{row['ms']:.0f}", f"{row['time_vs_fsdp2_float8']:.3f}", f"{row['peak_gib']:.1f}", host
    for row in rows("hf-8b8-m8-reshard.json").values():
        numbers = f"{row['ms']:.0f}", f"{row['tokens_per_s_per_rank']:,.0f}"
        yield *numbers, f"{row['time_vs_fsdp2_float8']:.3f}", f"{row['peak_gib']:.1f}"
    for row in results("trainer-1b-m4-2.json")["rows"]:
        speed = f"{row['tokens_per_s_per_rank']:,.0f}", f"{row['times_as_fast']:.2f}"
        yield f"{row['median_ms']:.0f}", *speed, f"{row['peak_gib']:.1f}"
    for row in results("replay-1-reshard.json")["rows"]:
        if row["place"] == "middle":
            times = f"{row['replay_us'] / 1e3:.2f}", f"{row['launch_us'] / 1e3:.2f}"
            yield f"{row['nodes']:,}", f"{row['eager_us'] / 1e3:.1f}", *times


@pytest.mark.parametrize("table", [bytes_of_steps, the_same_bits, steps, hugging_face_models])
def test_tables(table: Callable[[], Iterator[tuple[str, ...]]]) -> None:
    assert_rows(table())


def test_the_readmes_table_is_that_of_the_script(headline: ModuleType) -> None:
    assert headline.table() in README.read_text()


def test_the_readmes_first_sentence_is_measured(headline: ModuleType) -> None:
    """Ratios to FSDP2 with torchao, of the two jobs with the widths of Llama-8B."""
    gains = [job.cells[2].speed / job.cells[1].speed for job in headline.JOBS if "8B" in job.title]
    assert len(gains) == 2
    gain = f"{min(gains):.1f} to {max(gains):.1f} times as fast as FSDP2 with torchao"
    assert all(gain in " ".join(page.read_text().split()) for page in (README, DOCS["index.md"]))


def test_each_number_of_the_readme_comes_from_a_file(headline: ModuleType) -> None:
    """Numbers that stand alone, not in names such as FSDP2; versions are those that the package asks for."""
    cells = [cell for job in headline.JOBS for cell in job.cells if cell is not None]
    known = {f"{cell.speed:,.0f}" for cell in cells}
    for file in {cell.file for cell in cells}:
        known |= {str(results(f"{file}.json")["ranks"])}
    known |= {str(importlib.import_module("lib.hf_models").SIZES["8b8"].layers)}
    bf16 = rows("step-70b-l2-vocab-m16-keep.json")
    flag = results("flag-2.json")
    known |= {f"{row['median_ms']:.1f}" for row in flag["rows"]}
    known |= {f"{row['times_as_fast']:.2f}" for row in flag["rows"]}
    known |= {f"{row['tokens']:,}" for row in flag["rows"]} | {str(flag["job"]["microbatches"])}
    known |= {f"{bf16['fairscale']['tokens_per_s_per_rank']:,.0f}"}
    gains = [job.cells[2].speed / job.cells[1].speed for job in headline.JOBS if "8B" in job.title]
    known |= {f"{gain:.1f}" for gain in gains}
    known |= {"2.13" if version == "2.14" else version for version in re.findall(r"[<>]=?(\d\.\d+)", SETUP)}
    text = re.sub(r"```.*?```|`[^`]*`|\]\([^)]*\)", " ", README.read_text(), flags=re.DOTALL)
    numbers = re.findall(r"(?<![\w.-])\d[\d,]*(?:\.\d+)?(?![\w-]|\.\w)", text)
    assert len(numbers) > 15
    assert [number for number in numbers if number not in known] == []


def test_what_the_flag_gives() -> None:
    def cell(row: dict[str, Any]) -> str:
        gain = "" if row["way"] == "off" else f" ({row['times_as_fast']:.2f})"
        return f"{row['median_ms']:.1f}{gain}"

    cases: dict[tuple[str, int], list[str]] = {}
    for row in results("flag-2.json")["rows"]:
        cases.setdefault((row["dtype"], row["tokens"]), []).append(cell(row))
    assert_rows(map(tuple, cases.values()))


def test_layers() -> None:
    one, two = rows("layer.json"), rows("tensor-parallel-70b-2.json")
    shown = ("eager", "flat-bf16", "flat-bf16-fused", "eager-added", "flat-bf16-fused-added")
    split = ("torch-sp", "torch-compile-sp", "flat-bf16-sp", "flat-bf16-overlap", "torchao-sp", "flat-fp8-sp")

    def expected() -> Iterator[tuple[str, ...]]:
        for name in (*shown, "torchao-tensorwise", "flat-delayed-cached-fused", "floor"):
            yield f"{one[name]['ms']:.2f}", f"{one[name]['ms'] / one['torchao-tensorwise']['ms']:.3f}"
        for name in split:
            numbers = f"{two[name]['ms']:.2f}", f"{two[name]['tflops_per_rank']:.0f}"
            yield *numbers, f"{two[name]['time_vs_torchao']:.3f}"

    assert_rows(expected())
    assert (
        f"torchao 0.18 float8 tensorwise, torch.compile; rowwise {one['torchao-rowwise']['ms']:.2f}" in PROSE
    )


def test_collectives() -> None:
    shown = {2**power for power in (20, 24, 26, 28, 30)}
    found: dict[str, list[str]] = {}
    for row in results("collectives-nccl-4.json")["rows"]:
        if row["bytes"] in shown:
            found.setdefault(row["operation"], []).append(f"{row['bus_gb_s']:.0f}")
    assert_rows(tuple(numbers) for numbers in found.values())


def test_kernels() -> None:
    found = results("kernels.json")

    def percent(kernel: str, variant: str = "") -> list[str]:
        """Percent of a copy of as many bytes, for each size."""
        shares = (
            row for row in found["kernels"] if row["kernel"] == kernel and row["variant"].startswith(variant)
        )
        return [f"{100 * row['share_of_equal']:.0f}" for row in shares]

    def ratios(dtype: str) -> str:
        chosen = (row for row in found["wgrad"] if (row["dtype"], row["path"]) == (dtype, "in the GEMM"))
        return ", ".join(f"{row['ratio']:.2f}" for row in chosen)

    summed = percent("cast", "to E5M2: row, column, column sum")
    gelu, swiglu = (
        [percent(f"activation_{way}", name)[0] for way in ("forward", "backward")]
        for name in ("gelu", "swiglu")
    )
    normed = percent("norm_forward", "LayerNorm, to bf16") + percent("norm_forward", "LayerNorm, to FP8")
    logits = percent("cross_entropy_statistics") + percent("cross_entropy_grad")
    elementwise = percent("rope") + percent("dropout_forward") + percent("dropout_backward")
    cells = [
        f"{ratios('FP8')} times as fast",
        ratios("bf16"),
        f"{percent('adamw')[0]} %",
        f"{' / '.join(percent('cast', 'to E4M3: row, column'))} %; {' / '.join(summed)} %",
        f"{', '.join(gelu)} / {', '.join(swiglu)} %",
        f"{', '.join(logits)} %",
        f"{' / '.join(percent('norm_forward', 'RMSNorm'))} %",
        f"{', '.join(normed)} %",
        f"{' / '.join(percent('norm_backward'))} %",
        f"{' / '.join(percent('block_cast'))} %",
        f"{', '.join(elementwise)} %",
        f"{', '.join(percent('transpose_many') + percent('embedding_grad'))} %",
    ]
    assert_rows((cell,) for cell in cells)
    reached = [row["reached"] for row in found["kernels"] + found["wgrad"] if row["reached"] is not None]
    assert all(reached) and f"all {len(reached)} rows reach it" in PROSE


def test_kernels_of_many_tokens() -> None:
    shares: dict[str, list[float]] = {}
    for row in results("kernels-32768.json")["kernels"]:
        if row["size"].startswith("32768"):
            shares.setdefault(f"{row['kernel']} {row['variant']}", []).append(100 * row["share"])
    (norm,), (embedding,) = shares.pop("norm_forward LayerNorm, to FP8"), shares.pop("embedding_grad added")
    others = [share for of_sizes in shares.values() for share in of_sizes]
    assert f"kernels reach {min(others):.0f} to {max(others):.0f} %" in PROSE
    assert f"LayerNorm to FP8 ({norm:.1f} %) and the gradient of embeddings ({embedding:.0f} %)" in PROSE


def test_products() -> None:
    speeds: dict[str, list[float]] = {"fprop": [], "dgrad": []}
    for row in results("products.json")["rows"]:
        if row["path"] == "flatfsdp":
            speeds[row["direction"]].append(row["speed"])
    assert_rows([("; ".join(f"{min(found):.2f} to {max(found):.2f}" for found in speeds.values()),)])


def test_checkpoints() -> None:
    rows = results("checkpoint-1b-2.json")["rows"]
    assert_rows(
        (" and ".join(f"{each:.1f}" for each in row["seconds_of_each_round"]), f"{row['ratio']:.2f}")
        for row in rows
    )
    seconds = {(row["action"], row["name"]): row["seconds"] for row in rows}
    cost = seconds["save", "FlatFSDP"] / seconds["save", "FlatFSDP, no digests"]
    assert f"digests make a save {cost:.2f} times as long" in PROSE


def test_lanes() -> None:
    rows = results("lanes-70b-l2-s1k-2-replay.json")["rows"]
    ms = [(f"{row['median_ms']:.2f}", f"{row['median_lanes_ms']:.2f}") for row in rows]
    # FP32 first, then the same in bf16.
    assert_rows((*fp32, *bf16) for fp32, bf16 in zip(ms[:4], ms[4:], strict=True))
    ratios = [row["ratio"] for row in rows[:4]]
    assert f"{min(ratios):.2f} to {max(ratios):.2f} in FP32" in PROSE


def test_convergence() -> None:
    bf16, *others = results("convergence.json")["rows"]
    assert f"ends at a loss of {bf16['final_loss']:.3f} in bf16" in PROSE
    for row in others:
        assert f"{100 * row['against_bf16']:+.2f} % with" in PROSE, row["precision"]
