"""The benchmark of Hugging Face models trains with every engine alike, and its results are consistent.

It is here, not beside the other benchmarks' tests, because these ranks have already imported transformers.
"""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from flatfsdp.comm.launch import Rank
from tests.support.ecosystem.families import needs_transformers
from tests.support.ranks import on_ranks

pytestmark = needs_transformers

ROOT = Path(__file__).parents[2]
WARMUP, STEPS = 1, 2


@contextmanager
def benchmark(name: str) -> Iterator[ModuleType]:
    """A module of `benchmarks/`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        yield importlib.import_module(name)


@on_ranks(2)
def test_engines_are_measured_and_train_alike(rank: int, world_size: int, tmp_path: Path) -> None:
    with benchmark("hf") as hf:
        variants = tuple(v for engine in hf.Engine for v in hf.Variant.all_of(engine) if not v.compiled)
        job = hf.Job(
            "hf-tiny", hf.TrainedHFLlama(hf.SIZES["tiny"]), 2, True, STEPS, WARMUP, 1, variants, False, None
        )
        rows = hf.measure_all(Rank(rank, world_size, torch.device("cpu")), job)
        payload = hf.payload_of(rows, job, "tiny", world_size, "cpu")
        if rank == 0:
            hf.publish_all(payload, job, tmp_path, as_json=False)
            assert (tmp_path / "hf-tiny.png").stat().st_size > 0
            assert json.loads((tmp_path / "hf-tiny.json").read_text())["job"]["config"]["vocab"] == 96
    _check_rows({row["name"]: row for row in payload["rows"]})


def _check_rows(rows: dict[str, Any]) -> None:
    assert not any(row["failed"] for row in rows.values())
    assert "liger_kernel" in rows["liger"]["skipped"] or "need CUDA" in rows["liger"]["skipped"]
    assert not any(rows[name]["skipped"] for name in ("fsdp2", "flat", "flat-converted"))
    measured = {name: row for name, row in rows.items() if not row["skipped"]}
    losses = {name: row["runs"][0]["losses"] for name, row in measured.items()}
    for name, of_name in losses.items():
        assert len(of_name) == WARMUP + STEPS and all(map(math.isfinite, of_name)), name
        assert of_name[-1] < of_name[0], name
        assert of_name == pytest.approx(losses["fsdp2"], rel=2e-3), name
    # The first one is measured again at the end.
    assert len(rows["fsdp2"]["runs"]) == 2 and len(rows["flat"]["runs"]) == 1
    assert rows["flat"]["time_vs_fsdp2"] == rows["flat"]["ms"] / rows["fsdp2"]["ms"]
    assert losses["flat-converted"] != losses["flat"], "nothing was in FP8"
    reported = {name: row["runs"][0]["reported_gib"] for name, row in measured.items()}
    # One byte per weight of the layers between steps instead of two.
    assert reported["flat-converted-stored"] < reported["flat-converted"]


@on_ranks(2)
def test_what_liger_changes_in_transformers_is_put_back() -> None:
    with benchmark("hf") as hf, benchmark("lib.hf_engines") as engines:
        modeling = importlib.import_module(engines.MODELING)
        before = dict(vars(modeling))
        with engines._patches_of(hf.Variant(hf.Engine.liger)):
            modeling.apply_rotary_pos_emb = None
            modeling.of_liger = 1
        assert vars(modeling) == before


@on_ranks(2)
def test_comparisons_are_with_the_fastest_peer() -> None:
    def row(name: str, ms: float, peak: float) -> dict[str, Any]:
        return {"name": name, "ms": ms, "peak_gib": peak, "runs": [None], "not_replayed": None}

    fused = [row("flat-fused", 80.0, 30.0), row("flat-fused-fp8", 50.0, 30.0)]
    peers = [row("fsdp2", 200.0, 30.0), row("fsdp2-compile", 100.0, 40.0), row("liger-compile", 120.0, 0.0)]
    eager = row("flat-fused-replay", 10.0, 30.0) | {"not_replayed": 1}
    skipped = {"name": "liger-float8-compile", "ms": None, "peak_gib": None, "runs": []}
    with benchmark("hf") as hf:
        found = hf.compare([*fused, eager, *peers, row("fsdp2-float8-compile", 75.0, 60.0), skipped])
    assert [tuple(each.values()) for each in found] == [
        ("flat-fused-fp8", "fsdp2-float8-compile", 1.5, 0.5),
        ("flat-fused", "fsdp2-compile", 1.25, 0.75),
        ("flat-fused", "liger-compile", 1.5, None),
    ]
