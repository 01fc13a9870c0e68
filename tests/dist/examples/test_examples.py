"""The examples run as a user would run them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.programs import run_program

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.mark.parametrize("ranks", [1, 2])
def test_first_steps(ranks: int) -> None:
    done = run_program(EXAMPLES / "first_steps.py", ranks=ranks if ranks > 1 else 0)
    assert done.returncode == 0, done.stderr
    losses = [float(line.split()[3]) for line in done.stdout.splitlines() if line.startswith("step")]
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    assert "136,960 parameters, first: tokens.weight" in done.stdout


def run_example(name: str, *arguments: str | Path) -> str:
    """Runs an example and returns its output."""
    done = run_program(EXAMPLES / name, *arguments, COLUMNS="160")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_collectives() -> None:
    printed = run_example("collectives.py")
    tables = dict(
        paragraph.split("\n", 1) for paragraph in printed.strip().split("\n\n") if "rank 3" in paragraph
    )
    rows = {
        heading.split(":")[0]: [line.split() for line in table.splitlines()]
        for heading, table in tables.items()
    }
    after = {name: lines[-1] for name, lines in rows.items()}
    total = ["100", "104", "108", "112"]
    assert after["broadcast"] == ["after", *["10", "11", "12", "13"] * 4]
    assert after["scatter"] == ["after", "10", "11", "12", "13"]
    assert after["gather"] == ["after", "10", "20", "30", "40", "-", "-", "-"]
    assert after["all-gather"] == ["after", *["10", "20", "30", "40"] * 4]
    assert after["reduce-scatter"] == ["after", *total]
    assert after["all-reduce"] == ["after", *total * 4]
    *_, shards, gathered, reduced = rows["all-reduce = reduce-scatter + all-gather"]
    assert shards[-4:] == total
    assert gathered[-16:] == reduced[-16:] == total * 4
    assert "The last two rows are equal on each of 4 ranks." in printed


def test_overlap_on_cpu(tmp_path: Path) -> None:
    sizes = ["--device", "cpu", "--mib", "4", "--width", "128", "--repeats", "2"]
    printed = run_example("overlap.py", *sizes, "--out", tmp_path)
    assert "no GPU: a second thread" in printed
    times = [float(line.split()[-1]) for line in printed.splitlines() if line.startswith(WAYS_TO_RUN)]
    assert len(times) == len(WAYS_TO_RUN) and all(ms > 0 for ms in times)
    assert (tmp_path / "overlap.png").read_bytes().startswith(b"\x89PNG")


WAYS_TO_RUN = ("compute alone", "copy alone", "in sequence", "overlapped")


def test_data_parallel() -> None:
    sizes = ["--layers", "6", "--hidden", "32", "--seq", "32", "--batch", "2", "--steps", "4"]
    payload: dict[str, Any] = json.loads(run_example("data_parallel.py", *sizes, "--device", "cpu", "--json"))
    rows = {row["name"]: row for row in payload["rows"]}
    assert list(rows) == ["data parallel", "ZeRO-2", "ZeRO-3", "hybrid 2 x 2"]
    plain, zero2, zero3, hybrid = rows.values()

    for row in rows.values():
        assert len(row["losses"]) == 4
        assert row["losses"] == pytest.approx(plain["losses"], rel=1e-5)
        assert row["losses"][-1] < row["losses"][0]
    assert payload["largest_loss_difference"] <= 1e-5

    # Shards: all of FP32 parameters, gradients and two moments, a quarter of it, and half of it.  A shard's
    # padding and AdamW's step counts are less than 2 %.
    nbytes = 4 * payload["parameters"]
    for row, part in ((plain, 1), (zero2, 1 / 4), (zero3, 1 / 4), (hybrid, 1 / 2)):
        memory = row["memory"]
        assert memory["parameters"] == memory["gradients"] == pytest.approx(part * nbytes, rel=0.02)
        assert memory["optimizer"] == pytest.approx(2 * part * nbytes, rel=0.02)
        assert row["memory_total"] == sum(memory.values())
    # Beside them: nothing, all parameters, some layers.
    assert plain["memory"]["gathered"] == plain["memory"]["unreduced"] == 0
    assert zero2["memory"]["gathered"] == pytest.approx(nbytes, rel=0.02)
    assert 0 < zero3["memory"]["gathered"] < 0.7 * nbytes
    assert 0 < zero3["memory"]["unreduced"] < 0.7 * nbytes
    assert plain["memory_total"] > hybrid["memory_total"] > zero3["memory_total"]
    assert zero2["memory_total"] > zero3["memory_total"]

    # 3/4 of 4 bytes each way; all-reduce is both ways; ZeRO-3 gathers all but the root unit twice.
    three, six = (pytest.approx(sent, rel=0.02) for sent in (3.0, 6.0))
    assert plain["wire"] == {"gather": 0.0, "reduce": 0.0, "all_reduce": six}
    assert zero2["wire"] == {"gather": three, "reduce": three, "all_reduce": 0.0}
    assert 3.0 < zero3["wire"]["gather"] < 6.1
    assert zero3["wire"]["reduce"] == zero2["wire"]["reduce"]
    assert hybrid["wire"]["gather"] < zero3["wire"]["gather"]
    # Half of 4 bytes inside a pair; across pairs, twice half of the half that a rank holds.
    assert hybrid["wire"]["reduce"] == hybrid["wire"]["all_reduce"] == pytest.approx(2.0, rel=0.02)


def cells(printed: str) -> list[list[str]]:
    """The rows of the rich table that was printed."""
    lines = [line for line in printed.splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]


def test_quickstart_gives_the_same_layer_five_times() -> None:
    rows = cells(run_example("quickstart.py", "--device", "cpu", "--steps", "2"))
    assert [name[0] for name, _, _ in rows] == ["1", "2", "3", "4", "5"]
    assert all(float(ms) > 0 for _, ms, _ in rows)
    plain, *same, fp8 = (float(distance) for _, _, distance in rows)
    assert plain == 0
    # One bf16 rounding more or less; FP8 has three bits of mantissa.
    assert all(distance < 5e-3 for distance in same)
    assert 1e-3 < fp8 < 5e-2


def test_performance_adds_up_no_gradients_once_they_are_fused() -> None:
    rows = cells(run_example("performance.py", "--device", "cpu", "--microbatches", "2", "--steps", "1"))
    assert [name for name, *_ in rows] == [
        "bf16",
        "+ FP8 GEMMs",
        "+ weights cast once a step",
        "+ weight gradients fused",
    ]
    # 6 bytes a parameter in the first microbatch, 10 in the second; only vectors are left in the last row.
    *unfused, fused = (float(row[-1]) for row in rows)
    assert unfused == [16.0] * 3
    assert fused < 0.2


def test_fabric_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    pytest.importorskip("flatfsdp.compat.lightning", reason="needs Lightning Fabric")

    def steps(until: int, folder: str) -> list[str]:
        small = ["--accelerator", "cpu", "--layers", "1", "--microbatches", "2"]
        return run_example(
            "fabric.py", *small, "--steps", str(until), "--out", tmp_path / folder
        ).splitlines()

    through = steps(3, "through")
    assert [line.split()[:2] for line in through] == [["step", str(step)] for step in (1, 2, 3)]
    losses = [float(line.split()[3]) for line in through]
    assert losses[0] > losses[1] > losses[2]
    assert steps(2, "halves") + steps(3, "halves") == through
