"""`plan`: its output, its errors, and its search results."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from flatfsdp.fp8 import CurrentScaling, DelayedScaling
from flatfsdp.models import PRESETS
from flatfsdp.options import GradSync, Precision
from flatfsdp.plan import Job, Machine, Model, Parallelism, advise, plan, search
from flatfsdp.plan.links import Group
from tests.support.plan_command import check_refused, run

FP8 = Precision(compute=torch.bfloat16, fp8_weights=CurrentScaling())


def planned(*options: str) -> Any:
    result = run(*options, "--json")
    assert result.exit_code in (0, 1), result.output
    return json.loads(result.stdout)


def test_tables_add_up_and_say_whether_it_fits() -> None:
    result = run("--preset", "8b", "--gpus", "4", "--precision", "fp8-delayed", "--fp8-weights")
    assert result.exit_code == 0
    for words in (
        "master shard, float32",
        "activations",
        "gradients reduced over shards",
        "gemms",
        "It fits",
    ):
        assert words in result.output
    assert not dist.is_initialized()
    report = planned("--preset", "8b", "--gpus", "4", "--precision", "fp8-delayed", "--fp8-weights")
    memory = report["memory"]
    assert sum(memory["static"].values()) == memory["between_steps"]
    assert sum(memory["passing"].values()) + memory["between_steps"] == memory["peak"]
    assert sum(report["seconds"].values()) * 1e3 == pytest.approx(report["ms"])


def test_what_is_too_large_and_what_would_help_is_said() -> None:
    options = ("--preset", "1b", "--gpus", "4", "--microbatches", "4", "--gpu-memory", "22")
    report = planned(*options)
    assert not report["fits"] and list(report["too_large"]) == ["activations"]
    advice = {"; ".join(each["changes"]): each for each in report["advice"]}
    often = 'reduce gradients in every microbatch: grad_sync="every"'
    checkpoint = "activation checkpointing of each layer"
    assert advice[checkpoint]["fits"]
    assert advice[often]["peak_gib"] < 0.95 * report["peak_gib"]
    assert all(each["peak_gib"] < 0.95 * report["peak_gib"] for each in report["advice"])
    fits = [each["fits"] for each in report["advice"]]
    assert fits == sorted(fits, reverse=True) and any(fits)
    # What it says of a change is what a plan with the change says.
    changed = planned(*options, "--grad-sync", "every")
    assert (changed["peak_gib"], changed["ms"]) == (advice[often]["peak_gib"], advice[often]["ms"])
    best = report["advice"][0]
    assert planned(*options, *best["options"])["peak_gib"] == best["peak_gib"]
    shallow = run(*options[:-1], "12", "--layers", "4")
    assert shallow.exit_code == 1
    too_much = "GiB too much on one rank, at the backward: activations"
    words = ("DOES NOT FIT", too_much, checkpoint, "It fits with --")
    assert all(each in shallow.output for each in words)
    assert planned(*options[:-1], "40")["advice"] == []


def test_several_changes_are_offered_if_none_is_enough() -> None:
    found = plan(Job(PRESETS["70b"], Parallelism(dp_shard=64), microbatches=8))
    best, *others = advise(found)
    assert len(best.changes) == 2 and best.plan.fits
    assert best.plan.job.grad_sync == "every" and best.plan.job.checkpoint_layers
    assert [line.name for line in found.excess] == ["main_grad", "activations"]
    # More GPUs would not help: gradients and activations are not sharded.
    assert {each.plan.job.ranks.world for each in others} == {64}
    split = next(each.plan.job for each in others if each.plan.job.ranks.tp > 1)
    assert split.ranks.dp * split.microbatches == 64 * 8


def test_a_pipeline_may_reduce_gradients_in_every_microbatch() -> None:
    ranks = Parallelism(pp=2, dp_replicate=2, dp_shard=8)
    job = Job(replace(PRESETS["1b"], layers=4), ranks, microbatches=8)
    small = Machine(gpu_memory=8e9)
    last, every = plan(job, small), plan(replace(job, grad_sync="every"), small)
    whole, window = (
        next(line.nbytes for line in found.memory.passing if line.name == "main_grad")
        for found in (last, every)
    )
    # The embedding and the first layer, whose reductions run beside the next forward.
    assert window < whole * 3 / 4 and every.memory.peak < last.memory.peak - whole / 2
    assert every.sent == last.sent._replace(reduce=8 * last.sent.reduce)
    (offered,) = (
        each for each in advise(last) if each.plan.job.grad_sync == "every" and len(each.changes) == 1
    )
    assert offered.plan == every


def test_a_pipeline_names_the_rank_that_is_too_full() -> None:
    ranks = ("--gpus", "4", "--pp", "4", "--microbatches", "4", "--gpu-memory", "20")
    assert "on a rank of pipeline rank 0" in run("--preset", "1b", *ranks).output


def test_names_of_verify_mean_the_same() -> None:
    same = [
        ("fp8-weights", planned("--precision", "fp8-weights")),
        ("fp8-current", planned("--precision", "fp8-current", "--fp8-weights")),
    ]
    assert same[0][1] == same[1][1]
    unfused, fused = (planned("--precision", "bf16-fused", "--fusion", how)["ms"] for how in ("off", "fused"))
    assert fused < unfused


def test_machines_come_from_a_file_and_from_options(tmp_path: Path) -> None:
    slower = tmp_path / "machine.json"
    slower.write_text(json.dumps({"name": "half", "bf16_flops": 345e12, "link_bandwidth": 100e9}))
    default, half = planned("--gpus", "4"), planned("--gpus", "4", "--machine", str(slower))
    assert half["machine"]["name"] == "half"
    assert half["seconds"]["gemms"] == pytest.approx(2 * default["seconds"]["gemms"])
    fast = planned("--gpus", "4", "--machine", str(slower), "--link-bandwidth", "330")
    assert (
        fast["seconds"]["waiting for parameters and gradients"]
        < half["seconds"]["waiting for parameters and gradients"]
    )


def test_a_model_comes_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "model.json"
    file.write_text(json.dumps(asdict(PRESETS["debug"])))
    assert planned("--config", str(file)) == planned("--preset", "debug")


@pytest.mark.parametrize(
    ("option", "content", "message"),
    [
        ("--machine", {"teraflops": 1}, "'teraflops' is no number of a Machine, which has name, gpu_memory"),
        (
            "--machine",
            {"gpus_per_host": 8.0},
            "gpus_per_host of the machine is 8.0; it must be a whole number",
        ),
        ("--machine", {"link_bandwidth": 0}, "link_bandwidth of the machine is 0; it must be more"),
        ("--machine", {"bf16_flops": "fast"}, "bf16_flops of the machine is 'fast'; it must be a number"),
        ("--machine", [1], "is no JSON object"),
        ("--config", {"depth": 2}, "depth is 2; it must have numbers of layers, hidden"),
        ("--config", {"layers": "2"}, "layers is '2'; it must have numbers of layers, hidden"),
        ("--config", {"layers": 2, "hidden": 64}, "has no ffn, heads, kv_heads, vocab, seq"),
        ("--config", 1, "is no JSON object"),
    ],
)
def test_what_is_wrong_in_a_file_is_said(tmp_path: Path, option: str, content: Any, message: str) -> None:
    file = tmp_path / "file.json"
    file.write_text(json.dumps(content))
    check_refused(message, option, str(file))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--heads 24", "must be an even multiple of heads, 24"),
        ("--kv-heads 5", "must be a multiple of kv_heads, 5"),
        ("--gpus 6 --tp 4", "needs a multiple of 4 ranks, and there are 6"),
        ("--gpus 8 --dp-shard 3", "needs 3 ranks, and there are 8"),
        ("--gpus 16 --tp 16", "which 16 tensor-parallel ranks cannot share"),
        ("--gpus 8 --tp 8 --sequence-parallel --seq 100", "the sequence length is 100"),
        ("--gpus 64 --pp 64 --microbatches 64", "32 layers cannot be split into 64 stages"),
        ("--gpus 4 --pp 4 --microbatches 3", "a pipeline of 4 stages needs at least as many"),
        ("--gpus 4 --pp 4 --microbatches 9 --schedule interleaved", "choose a multiple of 4"),
        ("--precision fp8-delayed --seq 100", "tokens is 100; FP8 GEMMs need multiples of 16"),
        ("--precision bf16 --fp8-weights", "choose an FP8 precision"),
        ("--precision fp8-block --fp8-weights", "choose another recipe"),
        ("--search", "--search needs --global-batch"),
        ("--search --global-batch 1 --gpus 4096", "cannot share 1 sequences"),
        (
            "--search --global-batch 8 --gpu-memory 10",
            "shorter sequences, reductions in every microbatch, or FP8 weights",
        ),
    ],
)
def test_what_does_not_go_together_is_said(options: str, message: str) -> None:
    check_refused(message, *options.split())


def test_search_over_thousands_of_gpus_takes_seconds() -> None:
    job = Job(
        replace(PRESETS["70b"], layers=16), Parallelism.over(8192), precision=FP8, recipe=DelayedScaling()
    )
    start = time.process_time()
    (found,) = search(job, global_batch=8192, count=1)
    assert time.process_time() - start < 30  # about five
    ranks = found.job.ranks
    assert ranks.world == ranks.tp * ranks.pp * ranks.dp == 8192
    assert found.job.batch * found.job.microbatches * ranks.dp == 8192
    assert found.fits and plan(found.job) == found


def test_search_plans_pipelines_that_reduce_in_every_microbatch() -> None:
    job = Job(replace(PRESETS["1b"], layers=2), Parallelism.over(4), grad_sync="every")
    found = search(job, global_batch=16, count=100)
    assert {each.job.ranks.pp for each in found} == {1, 2}
    assert all(each.job.grad_sync == "every" and each == plan(each.job) for each in found[:2])


def test_search_passes_over_sizes_that_fp8_cannot_have() -> None:
    """8160 is 510 times 16: two ranks can have half of it, but four no quarter."""
    sizes = ("--layers", "2", "--global-batch", "64", "--precision", "fp8-delayed")
    options = ("--search", "--top", "1", *sizes, "--ffn")
    assert {each["ranks"]["tp"] for each in planned(*options, "8160")["found"]} <= {1, 2}
    check_refused("in_features is 8168", *options, "8168")


def test_a_table_of_layouts() -> None:
    sizes = ("--global-batch", "64", "--gpus", "16", "--preset", "8b", "--layers", "4")
    options = ("--search", "--top", "3", *sizes)
    assert "tp 2 + SP" in run(*options).output or "dp_shard 16" in run(*options).output
    found = planned(*options)["found"]
    assert len(found) == 3
    assert found[0]["tokens_per_s"] >= found[1]["tokens_per_s"] >= found[2]["tokens_per_s"]


@pytest.mark.parametrize("sync", ["last", "every"])
@pytest.mark.parametrize("frees", [True, False], ids=["zero3", "zero2"])
@pytest.mark.parametrize("layers", [1, 8])
def test_communication_waits_no_longer_than_it_takes(layers: int, frees: bool, sync: GradSync) -> None:
    """With few tokens next to nothing is hidden."""
    model, ranks = replace(PRESETS["8b"], layers=layers, seq=16), Parallelism.over(8)
    job = Job(model, ranks, microbatches=3, reshard_after_forward=frees, grad_sync=sync)
    share = plan(job).time.hidden_share
    assert share is not None and -1e-9 < share < 0.1


def test_what_a_job_cannot_be_is_refused() -> None:
    model = Model(lambda: nn.Linear(2, 2), [torch.zeros(2)])
    with pytest.raises(ValueError, match="is for a LlamaConfig"):
        Job(model, Parallelism(tp=2))
    with pytest.raises(ValueError, match='take "last" or "every"'):
        Job(PRESETS["1b"], Parallelism(dp_shard=2), grad_sync="auto")
    with pytest.raises(ValueError, match="search finds ranks for a LlamaConfig"):
        search(Job(model, Parallelism()), global_batch=1)


def test_groups_share_a_network_by_how_they_lie_in_hosts() -> None:
    machine = Machine(network_latency=0.0, link_latency=0.0)
    neighbours, apart = Group(machine, 16, stride=1), Group(machine, 16, stride=8)
    assert Group(machine, 8, stride=1).seconds(330e9) == pytest.approx(1.0)
    assert neighbours.in_one_host == 8 and neighbours.seconds(320e9) == pytest.approx(1.0)
    assert apart.in_one_host == 1 and apart.seconds(40e9) == pytest.approx(1.0)
    assert Group(machine, 1, stride=8).seconds(1e9) == 0.0
