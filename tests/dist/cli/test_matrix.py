"""`python -m flatfsdp verify --matrix`: the rows that run, what they compare, and what they detect."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

from flatfsdp import Precision
from flatfsdp.cli.app import app
from flatfsdp.cli.matrix import FP8, all_rows, matrix_plan
from flatfsdp.cli.report import left_out_lines
from flatfsdp.cli.verify import rows_on_rank
from flatfsdp.comm.launch import Device, Rank
from flatfsdp.comm.parallelism import Parallelism
from flatfsdp.fp8 import BlockScaling, CurrentScaling
from flatfsdp.models import LlamaConfig, LlamaPipeline
from flatfsdp.models.pipeline import SCHEDULES
from flatfsdp.parallel import make_mesh
from flatfsdp.parity import Comparison
from flatfsdp.training.choices import Fusion
from flatfsdp.training.jobs import Configuration
from tests.support.ranks import on_ranks, run_ranks

KINDS = ["losses", "gradients", "parameters", "optimizer state"]
STEPS = 2


def compared(rank: int, world_size: int, words: list[str], file: Path) -> list[Comparison]:
    options = {"only": words, "steps": STEPS}
    plan = matrix_plan(Device.cpu, world_size, options)
    return rows_on_rank(Rank(rank, world_size, torch.device("cpu")), (plan, plan.empty_report(), file)).rows


def names_of(world_size: int) -> list[str]:
    return [row.name for row in all_rows() if ranks_of(row).world == world_size]


def ranks_of(row: Configuration) -> Parallelism:
    assert row.parallelism is not None
    return row.parallelism


@pytest.mark.parametrize(
    ("world_size", "words", "number"),
    [
        (2, ["pp 2, interleaved, bf16", "tp 2, fp8-delayed", "tp 2 + SP, fp8-weights"], 3),
        (2, ["dp_shard 2, bf16, zero2, wgrad off, grad_sync every"], 1),
        (4, ["pp 2 x dp_shard 2, 1f1b, fp8-delayed", "pp 2 x tp 2 + SP, gpipe, bf16"], 2),
    ],
)
def test_rows_are_equal_and_every_rank_knows_it(
    world_size: int, words: list[str], number: int, tmp_path: Path
) -> None:
    first, *others = run_ranks(world_size, compared, words, tmp_path / "verify.json")
    assert len(first) == number
    for found in first:
        assert found.differences == {kind: [] for kind in KINDS}
        assert len(found.on.losses) == STEPS
        assert found.on.losses == found.off.losses
        assert found.on.falling
        # Otherwise nothing has been switched.
        assert found.on.bytes_per_parameter.get("concat", 0) == 0
        assert found.off.bytes_per_parameter["concat"] > 0
        assert found.on.local_bytes < found.off.local_bytes
    verdicts = [(found.about, found.differences, found.on.losses) for found in first]
    for theirs in others:
        assert [(found.about, found.differences, found.on.losses) for found in theirs] == verdicts


@pytest.mark.parametrize("self_test", [False, True])
def test_rows_with_lanes_are_compared_with_one_rank(self_test: bool, tmp_path: Path) -> None:
    chosen = ["--only", "zero2, lanes 4", "--precision", "fp8-delayed", "--steps", "2", "--ranks", "2"]
    options = [*chosen, "--device", "cpu", "--out", str(tmp_path), *(["--self-test"] if self_test else [])]
    done = CliRunner().invoke(app, ["verify", "--matrix", *options])
    assert done.exit_code == int(self_test), done.output
    report = json.loads((tmp_path / "verify-matrix.json").read_text())
    ends = [["1 rank", "2 ranks, flag off"], ["1 rank", "2 ranks, flag on"]]
    assert [row["ends"] for row in report["rows"]] == ends
    for row in report["rows"]:
        assert row["name"] == "dp_shard 2, fp8-delayed, zero2, lanes 4"
        assert row["same_as_one_rank"] is row["equal"] is not self_test
        # Microbatches of two ranks, of which one rank has done all.
        assert row["off"]["losses"] == row["on"]["losses"] and len(row["on"]["losses"]) == 2
    assert report["not_run"] == []
    last_column = [line.split()[-1:] for line in done.output.splitlines()]
    assert last_column.count(["NO" if self_test else "yes"]) == 2


def test_the_reference_is_there() -> None:
    names = set(names_of(8))
    for precision in ("bf16", "fp8-delayed"):
        for schedule in ("gpipe", "1f1b", "interleaved"):
            assert f"pp 2 x dp_shard 2 x tp 2 + SP, {schedule}, {precision}, zero2" in names
            assert f"pp 2 x dp_shard 2 x tp 2 + SP, {schedule}, {precision}, zero3, wgrad off" in names
        assert f"dp_shard 4 x tp 2 + SP, {precision}, zero2" in names
    everything = [row.name for row in all_rows()]
    assert len(everything) == len(set(everything))


def test_a_plan_takes_the_rows_that_fit_and_says_why_others_do_not() -> None:
    options = {"layers": 2, "only": ["pp 2"], "precision": [FP8], "steps": 7}
    plan = matrix_plan(Device.cpu, 2, options)
    assert [row.configuration.name for row in plan.rows] == [
        "pp 2, gpipe, fp8-delayed, zero3, wgrad off",
        "pp 2, 1f1b, fp8-delayed, zero3",
    ]
    assert {(row.settings.steps, row.settings.model.layers) for row in plan.rows} == {(7, 2)}
    reasons = " ".join(left_out_lines(plan.empty_report()))
    assert "they need 4 ranks: pp 2 x tp 2 + SP (3), " in reasons
    assert "2 layers cannot be split into 4 stages" in reasons
    fused = [row.configuration for row in matrix_plan(Device.cpu, 2, {"fusion": [Fusion.two_pass]}).rows]
    assert {(row.parallelism, row.schedule) for row in fused} == {(Parallelism(pp=2), "interleaved")}


@on_ranks(2)
def test_a_run_that_is_stopped_leaves_what_it_found(rank: int, world_size: int, tmp_path: Path) -> None:
    file, chosen = tmp_path / "verify.json", ["pp 2, 1f1b, fp8-delayed", "pp 2, interleaved, fp8-delayed"]
    plan = matrix_plan(Device.cpu, world_size, {"only": chosen, "steps": 1})
    good, bad = plan.rows
    settings = replace(bad.settings, model=replace(bad.settings.model, ffn=72))
    plan = replace(plan, rows=(good, replace(bad, settings=settings)))
    with pytest.raises(ValueError, match="in_features is 72"):
        rows_on_rank(Rank(rank, world_size, torch.device("cpu")), (plan, plan.empty_report(), file))
    dist.barrier()
    report = json.loads(file.read_text())
    assert [row["name"] for row in report["rows"]] == ["pp 2, 1f1b, fp8-delayed, zero3"]
    assert report["not_run"] == ["pp 2, interleaved, fp8-delayed, zero3, wgrad two-pass"] and report["equal"]


@on_ranks(2)
def test_a_pipeline_that_cannot_run_raises_on_every_rank() -> None:
    sizes = LlamaConfig(2, 32, 64, heads=2, kv_heads=2, vocab=256, seq=16)
    mesh = make_mesh(pp=2)
    with pytest.raises(ValueError, match=r"schedule is 'zero'; it must be one of \('gpipe', "):
        LlamaPipeline(sizes, mesh, "zero", microbatches=2, batch=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="2 layers cannot be split into 4 stages"):
        LlamaPipeline(sizes, mesh, "interleaved", microbatches=2, batch=1)
    pipeline = LlamaPipeline(sizes, mesh, microbatches=2, batch=1)
    tokens = torch.zeros(1, 16, dtype=torch.int64)
    for run in (pipeline.forward_backward, pipeline.evaluate):
        with pytest.raises(ValueError, match="there are 3 batches, and 2 microbatches"):
            run([(tokens, tokens)] * 3)
        for other in (tokens[:, :8], torch.cat([tokens, tokens]), tokens[0]):
            with pytest.raises(ValueError, match=r"the pipeline was made for \(1, 16\)"):
                run([(tokens, tokens), (tokens, other)])
    for counts in ({"microbatches": 0, "batch": 1}, {"microbatches": 2, "batch": -1}):
        for schedule in SCHEDULES:
            with pytest.raises(ValueError, match="it must be positive"):
                LlamaPipeline(sizes, mesh, schedule, **counts)
    stored = Precision(fp8_weights=CurrentScaling())
    for recipe in (None, BlockScaling()):
        with pytest.raises(ValueError, match="needs a CurrentScaling or DelayedScaling"):
            LlamaPipeline(sizes, mesh, microbatches=2, batch=1, precision=stored, recipe=recipe)
    for other, message in (
        ({"seq": 24}, "1 x 24 tokens in a microbatch: FP8 needs multiples of 16"),
        ({"ffn": 72}, r"LayerNormMLP\.fc2_weight: in_features is 72"),
    ):
        with pytest.raises(ValueError, match=message):
            LlamaPipeline(replace(sizes, **other), mesh, microbatches=2, batch=1, recipe=CurrentScaling())
    with pytest.raises(ValueError, match="seq is 15; choose a multiple of the 2"):
        LlamaPipeline(
            replace(sizes, seq=15), make_mesh(tp=2), microbatches=2, batch=1, sequence_parallel=True
        )


def test_one_damaged_bit_is_noticed_and_files_are_written(tmp_path: Path) -> None:
    options = ("--ranks", "2", "--steps", "2", "--only", "pp 2, 1f1b, fp32", "--out", str(tmp_path))
    done = CliRunner().invoke(
        app, ["verify", "--matrix", "--device", "cpu", *options, "--self-test", "--json"]
    )
    assert done.exit_code == 1, done.output
    report: dict[str, Any] = json.loads(done.stdout)
    assert report == json.loads((tmp_path / "verify-matrix.json").read_text())
    (row,) = report["rows"]
    assert row["name"] == "pp 2, 1f1b, fp32, zero3"
    assert (row["ranks"], row["precision"], row["strategy"], row["fusion"]) == (2, "fp32", "zero3", "")
    assert (report["options"]["steps"], report["environments"][0]["world_size"]) == (2, 2)
    assert not row["equal"] and not report["equal"]
    # The last rank has stage 1 alone.
    (damaged,) = row["differences"]["gradients"]
    assert damaged.startswith("rank 1: step 1, stage 1.")
    assert " 1 of " in damaged
