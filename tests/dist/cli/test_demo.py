"""`python -m flatfsdp demo`: five rows, one sentence about all of them, and damage that it notices."""

from __future__ import annotations

from tests.support.programs import run_program

COMMAND = ("-m", "flatfsdp", "demo")


def test_all_rows_are_equal() -> None:
    done = run_program(*COMMAND)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line for line in done.stderr.splitlines() if " of 5 " in line]
    assert [row.partition("  ")[0] for row in rows] == [f"{number} of 5" for number in range(1, 6)]
    assert all(row.rstrip().endswith("6/6 equal") for row in rows), rows
    assert "pp 2 x tp 2" in rows[-1]
    assert done.stdout.startswith("Each row trains") and "Proven: in all 5 rows" in done.stdout
    assert "tokens/s" not in done.stderr


def test_one_damaged_bit_in_each_row_is_noticed() -> None:
    done = run_program(*COMMAND, "--self-test")
    said = " ".join(done.stdout.split())
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Proven" not in said
    assert said.count("gradients: first difference on rank 1: step 1, ") == 4
    assert said.count("gradients: first difference on rank 3: step 1, ") == 1
