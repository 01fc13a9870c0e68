"""`examples/pretrain_llama.py` trains over several ranks, and resumes after it was killed or stopped."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from typer.testing import CliRunner

from examples.timeline import load_spans, overlap_of
from tests.support.checkpoints import names_in
from tests.support.programs import TORCHRUN, Program, run_program

EXAMPLE = Path(__file__).parents[3] / "examples" / "pretrain_llama.py"
SIZES = {"layers": 4, "hidden": 32, "ffn": 64, "heads": 2, "kv_heads": 1, "vocab": 256, "seq": 32}
OPTIONS = (
    *("--pp", "2", "--schedule", "interleaved", "--precision", "fp8-delayed", "--microbatches", "2"),
    *("--batch", "1", "--steps", "6", "--save-every", "2", "--warmup", "2", "--lr", "1e-2"),
    *("--data", __file__, "--json"),
)


# Two ranks would share one.
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}


def command_of(folder: Path, *options: str) -> list[str]:
    config = folder / "sizes.json"
    config.write_text(json.dumps(SIZES))
    return [str(EXAMPLE), *OPTIONS, "--config", str(config), "--out", str(folder), *options]


def start(folder: Path, *options: str) -> subprocess.Popen[str]:
    """Two ranks of torchrun, in a process group of their own."""
    return subprocess.Popen(
        [sys.executable, *TORCHRUN, *command_of(folder, *options)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, **NO_GPU},
    )


def resume(folder: Path, *options: str) -> list[dict[str, Any]]:
    """The steps of a run that ends by itself."""
    done = run_program(*command_of(folder), *options, ranks=2, **NO_GPU)
    assert done.returncode == 0, done.stderr
    return list(steps_in(done.stdout.splitlines(keepends=True)))


def steps_in(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Reads whole lines: a run that is killed may not get to the end of its last one."""
    return (json.loads(line) for line in lines if line.startswith("{") and line.endswith("}\n"))


def test_a_run_that_was_killed_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    run = Program(*command_of(tmp_path), ranks=2, **NO_GPU)
    while '{"step": 5,' not in run.printed()[0]:
        assert run.is_alive(), run.printed()
        time.sleep(0.01)
    killed = list(steps_in(run.kill().splitlines(keepends=True)))
    assert [step["step"] for step in killed][:5] == [1, 2, 3, 4, 5]
    assert killed[4]["loss"] < killed[0]["loss"]
    # It may have got further before the signal came.
    older, newer = sorted(path.parent for path in (tmp_path / "checkpoints").glob("*/.metadata"))
    # As if it had been killed at the end of saving the newer one.
    (newer / ".metadata").rename(newer / ".metadata.tmp")
    first = int(older.name.removeprefix("step-"))
    assert first in (2, 4)

    resumed = resume(tmp_path, "--trace")
    assert [step["step"] for step in resumed] == list(range(first + 1, 7))
    for before, after in zip(killed[first:], resumed, strict=False):
        for figure in ("loss", "grad_norm"):
            assert after[figure] == before[figure], (figure, after["step"])
    assert all(step["tokens_per_s"] > 0 and step["peak_gib"] > 0 for step in resumed)
    assert names_in(older.parent) == ["step-00000004", "step-00000006"]
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")
    spans, title = load_spans(tmp_path / "step.json")
    assert "send/recv" in [track.kind for track in overlap_of(spans).tracks]
    assert title.endswith(f"fp8-delayed, step {min(first + 3, 6)}")
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


def test_sigterm_saves_and_a_damaged_checkpoint_is_passed_over(tmp_path: Path) -> None:
    """A thread writes; the run ends when its save has ended."""
    ended: list[dict[str, Any]] = []
    options = ("--async-save", "--checkpoints", f"file://{tmp_path}/elsewhere")
    run = start(tmp_path, *options)
    assert run.stdout is not None
    for step in steps_in(run.stdout):
        ended.append(step)
        if step["step"] == 3:
            # As torchrun itself is told to end, which tells its ranks.
            run.terminate()
    assert run.wait() != 0
    newest = max((tmp_path / "elsewhere").glob("step-*/.metadata")).parent
    # Step 4 may have begun before the signal came, or not; it would be saved in any case.
    last = ended[-1]["step"]
    assert newest.name == f"step-{last:08}"
    assert last < 6
    for file in newest.glob("*.distcp"):
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 16
        file.write_bytes(content)

    resumed = resume(tmp_path, *options)
    assert [step["step"] for step in resumed] == [3, 4, 5, 6]
    for before, after in zip(ended[2:], resumed, strict=False):
        assert (after["loss"], after["grad_norm"]) == (before["loss"], before["grad_norm"])
    assert f"damaged-{newest.name}" in [path.name for path in (tmp_path / "elsewhere").iterdir()]


WITH_TENSORBOARD = """
import pathlib, runpy, sys, types

class SummaryWriter:
    def __init__(self, folder, purge_step):
        pathlib.Path(folder).mkdir()
        self.file = open(f"{folder}/points", "w")
    def add_text(self, name, text):
        pass
    def add_scalar(self, *point):
        print(*point, file=self.file)
    def close(self):
        self.file.close()

for name in ("tensorboard", "torch.utils.tensorboard"):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__spec__ = object()
sys.modules["torch.utils.tensorboard"].SummaryWriter = SummaryWriter
del sys.argv[0]
sys.path.insert(0, str(pathlib.Path(sys.argv[0]).parent))
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Runs a program with a library that stands for TensorBoard's."""


def test_figures_go_to_logs(tmp_path: Path) -> None:
    program = tmp_path / "with_tensorboard.py"
    program.write_text(WITH_TENSORBOARD)
    run = (*command_of(tmp_path), "--steps", "3", "--log-to", "jsonl", "--log-to", "tensorboard")
    done = run_program(str(program), *run, ranks=2, **NO_GPU)
    assert done.returncode == 0, done.stderr
    printed = list(steps_in(done.stdout.splitlines(keepends=True)))
    assert [step["step"] for step in printed] == [1, 2, 3]
    # The first rank alone writes.
    assert printed == list(steps_in((tmp_path / "metrics.jsonl").read_text().splitlines(keepends=True)))
    points = [line.split() for line in (tmp_path / "tensorboard" / "points").read_text().splitlines()]
    for name in ("loss", "grad_norm", "tokens_per_s", "tflops_per_rank", "peak_gib", "data_share"):
        shown = [(int(step), float(value)) for each, value, step in points if each == name]
        assert shown == [(step["step"], step[name]) for step in printed]
    # Unknown on a CPU: null, and no curve.
    assert printed[0]["mfu"] is printed[0]["replayed"] is None
    assert not {"mfu", "replayed"} & {point[0] for point in points}


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (("--log-to", "wandb"), "pip install wandb"),
        (("--checkpoints", "tos://bucket/run"), "pip install tosfs"),
        (("--memory-snapshot",), "records allocations of a GPU"),
        (("--flight-recorder",), "records collectives of NCCL"),
    ],
)
def test_what_cannot_be_written_is_refused(tmp_path: Path, option: tuple[str, ...], message: str) -> None:
    if "wandb" in option and importlib.util.find_spec("wandb") is not None:
        pytest.skip("wandb is installed")
    done = run_program(*command_of(tmp_path), *option, **NO_GPU)
    words = " ".join(done.stderr.replace("│", " ").split())
    assert done.returncode == 2 and message in words, done.stderr


LANES = (
    *("--lanes", "4", "--microbatches", "8", "--batch", "1", "--steps", "6", "--save-every", "3"),
    *("--warmup", "2", "--lr", "1e-2", "--clip", "0.1", "--data", __file__, "--json"),
)


def run_with_lanes(ranks: int, folder: Path, *options: str) -> CompletedProcess[str]:
    """A run on this many ranks, each with one thread: GEMMs on several add in another order."""
    folder.mkdir(exist_ok=True)
    config = folder / "sizes.json"
    config.write_text(json.dumps(SIZES))
    command = (EXAMPLE, *LANES, "--config", config, "--out", folder, *options)
    return run_program(*command, ranks=ranks, OMP_NUM_THREADS="1", **NO_GPU)


def saved_in(folder: Path) -> dict[str, Any]:
    """Tensors of model and optimizer at the end of a run, by name, without FlatFSDP."""
    dcp_to_torch_save(folder / "checkpoints" / "step-00000006", folder / "plain.pt")
    saved = torch.load(folder / "plain.pt")
    states = saved["optimizer"]["state"].items()
    moments = {f"{key} of {name}": value for name, state in states for key, value in state.items()}
    return {**saved["model"], **moments}


@pytest.mark.parametrize(("precision", "ranks"), [("fp32", 1), ("bf16", 4)])
def test_with_lanes_a_run_goes_on_with_the_same_bits_on_other_ranks(
    tmp_path: Path, precision: str, ranks: int
) -> None:
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    done = run_with_lanes(2, whole, "--precision", precision)
    assert done.returncode == 0, done.stderr
    # As if it had been killed before step 6 was saved.
    shutil.copytree(whole / "checkpoints" / "step-00000003", resumed / "checkpoints" / "step-00000003")
    if ranks == 1:
        refused = run_with_lanes(ranks, resumed, "--precision", precision, "--lanes", "8")
        assert refused.returncode != 0
        both = "the checkpoint has Lanes(number=4, block=1), and the model Lanes(number=8, block=1)"
        assert both in refused.stderr
    again = run_with_lanes(ranks, resumed, "--precision", precision)
    assert again.returncode == 0, again.stderr
    steps, expected = (list(steps_in(each.stdout.splitlines(keepends=True))) for each in (again, done))
    losses = [(step["step"], step["loss"]) for step in expected]
    assert [(step["step"], step["loss"]) for step in steps] == losses[3:]
    ours, theirs = saved_in(resumed), saved_in(whole)
    assert ours.keys() == theirs.keys()
    assert "exp_avg of embedding.weight" in ours
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


def test_when_gradients_are_reduced_is_a_setting_of_the_run(tmp_path: Path) -> None:
    """It changes the order of sums over two shards, but not over two stages."""
    options = ("--steps", "2", "--grad-sync", "every", "--pp")
    for pp, said, sequences in (("1", "every", 8), ("2", "last", 4)):
        folder = tmp_path / pp
        folder.mkdir()
        assert [step["step"] for step in resume(folder, *options, pp)] == [1, 2]
        (file,) = folder.glob("checkpoints/*/extra-*.pt")
        extra = torch.load(file)
        assert (extra["settings"]["grad sync"], extra["sequences"]) == (said, sequences)
    # "auto" is the setting that it chooses, on a CPU "last".
    refused = run_program(
        *command_of(tmp_path), *options[:-2], "auto", "--pp", "1", "--out", tmp_path / "1", ranks=2, **NO_GPU
    )
    assert "grad sync was every and is last" in " ".join(refused.stderr.replace("│", " ").split())


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The example as a module."""
    monkeypatch.syspath_prepend(EXAMPLE.parent)
    spec = importlib.util.spec_from_file_location("pretrain_llama", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_run_goes_on_with_the_next_text_in_other_batches(
    example: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each sequence is read once, in its order."""
    read: list[int] = []
    sample_from = example.Sampler.sample_from

    def noted(text: Any, number: int) -> Any:
        read.extend(range(number, number + text.batch))
        return sample_from(text, number)

    monkeypatch.setattr(example.Sampler, "sample_from", noted)
    command = [*command_of(tmp_path)[1:], "--pp", "1", "--precision", "fp32", "--device", "cpu"]
    # A step of 2 x 1 sequences, then of 1 x 3.
    for steps, sizes in (("2", ()), ("4", ("--microbatches", "1", "--batch", "3", "--accept-changes"))):
        result = CliRunner().invoke(example.app, [*command, "--steps", steps, *sizes])
        assert result.exit_code == 0, result.output
    assert read == list(range(2 * 2 + 2 * 3))
    (extra,) = tmp_path.glob("checkpoints/step-00000004/extra-*.pt")
    assert torch.load(extra)["sequences"] == len(read)


def test_lanes_say_when_gradients_are_reduced(example: Any) -> None:
    result = CliRunner().invoke(example.app, ["--lanes", "4", "--grad-sync", "every"])
    assert result.exit_code == 2 and "leave --grad-sync out" in result.output


def test_other_settings_are_refused_by_name(example: Any) -> None:
    settings = {"model": {"heads": 2}, "seed": 0, "precision": "bf16"}
    example.check_same_run(settings, dict(settings))
    with pytest.raises(
        example.typer.BadParameter, match="seed was 0 and is 1; precision was bf16 and is fp32"
    ):
        example.check_same_run(settings, {**settings, "seed": 1, "precision": "fp32"})
    with pytest.raises(example.typer.BadParameter, match=r"heads.: 4"):
        example.check_same_run(settings, {**settings, "model": {"heads": 4}})
