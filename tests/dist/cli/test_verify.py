"""`python -m flatfsdp verify`, as a user runs it: its verdict, its files, its exit codes."""

import json
import re
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
from typer.testing import CliRunner

from flatfsdp.cli.app import app
from tests.support.programs import run_program

KINDS = ["losses", "gradients", "parameters", "optimizer state"]
TINY = ["--device", "cpu", "--layers", "2", "--hidden", "32", "--heads", "2", "--seq", "32", "--batch", "2"]


def verify(out: Path, *options: str) -> CompletedProcess[str]:
    return run_program("-m", "flatfsdp", "verify", *TINY, "--out", out, *options)


def written(out: Path) -> dict[str, Any]:
    assert (out / "losses.png").read_bytes().startswith(b"\x89PNG")
    report: dict[str, Any] = json.loads((out / "verify.json").read_text())
    return report


def test_flag_on_equals_flag_off(tmp_path: Path) -> None:
    done = verify(tmp_path, "--steps", "6", "--switch", "flag", "--precision", "fp32", "--precision", "bf16")
    assert done.returncode == 0, done.stderr
    report = written(tmp_path)
    names = [(row["precision"], row["strategy"]) for row in report["rows"]]
    assert names == [("fp32", "zero2"), ("fp32", "zero3"), ("bf16", "zero2"), ("bf16", "zero3")]
    assert report["equal"] and report["not_run"] == []
    (environment,) = report["environments"]
    assert environment["world_size"] == 2 and environment["gpus"] == 0
    assert report["options"]["microbatches"] == 4
    for row in report["rows"]:
        assert row["differences"] == {kind: [] for kind in KINDS}
        assert row["falling"]
        assert len(row["off"]["losses"]) == 6
        assert row["off"]["losses"] == row["on"]["losses"]
        assert row["on"]["bytes_per_parameter"].get("concat", 0) == 0
        assert row["on"]["local_bytes"] < row["off"]["local_bytes"]
        assert float.fromhex(row["on"]["final_loss_hex"]) == row["on"]["losses"][-1]
        assert done.stdout.count(row["on"]["final_loss_hex"]) >= 2
    assert "DIFFER" not in done.stdout
    assert "on equals off, bit for bit" in done.stdout.lower()


def test_own_layers_with_each_switch(tmp_path: Path) -> None:
    precisions = ("fp8-delayed", "fp8-weights")
    options = [option for precision in precisions for option in ("--precision", precision)]
    fusions = ("--fusion", "off", "--fusion", "two-pass", "--fusion", "fused")
    done = verify(tmp_path, "--steps", "2", "--strategy", "zero3", *options, *fusions)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = written(tmp_path)["rows"]
    names = [(row["precision"], row["switch"], row["fusion"]) for row in rows]
    flag = [("flag", "wgrad off"), ("flag", "wgrad two-pass"), ("flag", "")]
    fp8 = [*flag, ("fusion", ""), ("cache", "")]
    assert names == [
        *(("fp8-delayed", *row) for row in fp8),
        *(("fp8-weights", *row) for row in (*fp8[:-1], ("storage", ""))),
    ]
    for row in rows:
        assert row["equal"]
        assert row["differences"] == {kind: [] for kind in KINDS}
        if row["fusion"] == "" and row["switch"] == "flag":
            # Matrices were added by their own layers; of 42,880 parameters only norms and biases are left: 6
            # bytes in the first microbatch and 10 in each of three more.
            vectors = 2 * (64 + 96 + 32 + 64 + 128 + 32) + 64
            expected = 36 * vectors / 42_880
            assert row["on"]["bytes_per_parameter"]["accumulate"] == pytest.approx(expected)
    losses = {(row["precision"], row["fusion"]): row["on"]["losses"] for row in rows}
    # Different precisions are different computations: otherwise the rows prove nothing.
    assert len({tuple(values) for values in losses.values()}) >= len(precisions)


def test_numbers_of_ranks_have_the_same_bits_but_for_lanes_out_of_place(tmp_path: Path) -> None:
    options = ["--world", "1,2", "--steps", "2", "--strategy", "dp", "--strategy", "zero3", "--precision"]
    done = verify(tmp_path, *options, "bf16")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "verify-world.json").read_text())
    assert report["equal"] and report["options"]["worlds"] == [1, 2]
    first = "1 rank, dp, flag on"
    others = ["1 rank, dp, flag off", "1 rank, zero3, flag on", "1 rank, zero3, flag off"]
    others += [f"2 ranks, {strategy}, flag {flag}" for strategy in ("dp", "zero3") for flag in ("on", "off")]
    assert [row["ends"] for row in report["rows"]] == [[first, other] for other in others]
    assert "The same bits on 1, 2 ranks: 7 comparisons of 2 steps, each of 4 microbatches" in done.stdout
    # In FP32: sums of a few bf16 numbers are exact in any order.
    damaged = verify(tmp_path, *options, "fp32", "--self-test")
    assert damaged.returncode == 1
    first = r"zero3, flag on, gradients: first difference on step 0, [\w.]+\.weight: "
    assert re.search(first, " ".join(damaged.stdout.split()))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--world", "1,x"), "it takes numbers of ranks"),
        (("--world", "2"), "two numbers of ranks or more"),
        (("--world", "2,4", "--lanes", "6"), "do not all divide"),
        (("--world", "1,2", "--microbatches", "3"), "take a multiple of 2"),
        (("--world", "1,2", "--matrix"), "--matrix does not apply to --world"),
        (("--lanes", "2"), "--lanes goes with --world"),
        (("--world", "1,2", "--lanes", "2", "--self-test"), "--self-test needs 3"),
    ],
)
def test_worlds_that_make_no_sense(tmp_path: Path, options: tuple[str, ...], message: str) -> None:
    result = CliRunner().invoke(app, ["verify", *TINY, "--out", str(tmp_path), *options])
    assert result.exit_code == 2 and message in " ".join(result.output.replace("\u2502", " ").split())


def test_one_damaged_bit_on_one_rank_is_noticed(tmp_path: Path) -> None:
    options = ("--switch", "flag", "--precision", "fp32", "--strategy", "zero3")
    done = verify(tmp_path, "--steps", "4", "--self-test", *options)
    assert done.returncode == 1
    assert "DIFFER" in done.stdout
    (row,) = written(tmp_path)["rows"]
    assert not row["equal"]
    # The damage is on rank 1, which does not report; rank 0 sees it when the parameters have carried it over.
    gradients = row["differences"]["gradients"][-1]
    assert gradients.startswith("rank 1: step 1, ")
    assert " 1 of " in gradients
    assert f"fp32, zero3, flag off / flag on, gradients: first difference on {gradients}" in " ".join(
        done.stdout.split()
    )


def test_torchrun_json_and_data_parallel(tmp_path: Path) -> None:
    chosen = ("--switch", "flag", "--precision", "fp32", "--strategy", "dp")
    options = ("--steps", "2", *chosen, "--json", "--out", tmp_path)
    done = run_program("-m", "flatfsdp", "verify", *TINY, *options, ranks=2)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == written(tmp_path)
    assert [row["strategy"] for row in written(tmp_path)["rows"]] == ["dp"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--data", "no/such/file"], "no/such/file does not exist"),
        (["--microbatches", "0"], "--microbatches"),
        (["--hidden", "30", "--heads", "4"], "multiple of heads"),
        (["--strategy", "zero4"], "'zero2', 'zero3'"),
        (["--lr", "0"], "lr is 0.0; it must be above 0"),
        (["--hidden", "40", "--precision", "fp8-delayed"], "multiples of 16"),
        (["--device", "cuda", "--ranks", "1000"], "one GPU for each of 1000 ranks"),
        (["--out", "s3://bucket/run"], "s3://bucket/run is a URL"),
        (["--data", "gs://bucket/text"], "gs://bucket/text is a URL"),
    ],
)
def test_senseless_options_are_explained(
    options: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner(env={"COLUMNS": "200", "TERM": "dumb"}).invoke(app, ["verify", *options])
    assert result.exit_code == 2
    assert message in result.output
    assert "Traceback" not in result.output
    assert not list(tmp_path.iterdir())


OWN = ["--model", "json:loads", "--batches", "json:loads"]
CPU = ["--device", "cpu"]
MATRIX = ["--matrix", *CPU]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        # Both runs would be the same, so their equality would prove nothing.
        (["--switch", "replay", *CPU], "--switch replay: on CPUs microbatches are not replayed"),
        (["--switch", "storage", "--precision", "fp8-delayed", *CPU], "no weights are stored in FP8"),
        ([*MATRIX, "--switch", "replay"], "leave --switch out"),
        ([*MATRIX, "--switch", "flag", "--switch", "fusion"], "leave --switch out"),
        ([*MATRIX, "--only", "pp 3"], "no row of the matrix can run here"),
        ([*MATRIX, "--ranks", "3"], "they need 4 ranks"),
        ([*MATRIX, "--steps", "0"], "--steps"),
        ([*MATRIX, "--heads", "1", "--only", "tp 2,"], "kv_heads is 1, which 2 tensor-parallel ranks"),
        ([*MATRIX, "--seq", "33", "--only", "+ SP"], "seq is 33, which 2 tensor-parallel ranks cannot share"),
        (["--only", "PP 2"], "--only chooses among rows of --matrix"),
        (["--model", "a.py:build"], "--model and --batches go together"),
        (["--model", "a.py:build", "--batches", "a.py:b"], "there is no file a.py"),
        (["--model", "build", "--batches", "json:loads"], "'build' names no function"),
        (["--model", "json:build", "--batches", "json:loads"], "json has no function 'build'"),
        (["--model", "no.such:build", "--batches", "json:loads"], "'no.such:build': No module named 'no'"),
        ([*OWN, "--hidden", "64"], "--hidden does not apply to a"),
        ([*OWN, *2 * ["--precision", "fp32"]], "--model takes one --precision, not 2"),
        ([*OWN, "--matrix"], "--matrix does not apply to a"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_options_of_verify_that_make_no_sense(options: Any, message: str, tmp_path: Path) -> None:
    runner = CliRunner(env={"COLUMNS": "200", "TERM": "dumb"})
    result = runner.invoke(app, ["verify", *options, "--out", str(tmp_path / "out")])
    assert result.exit_code == 2, result.output
    assert message in result.output
    assert not (tmp_path / "out").exists()
