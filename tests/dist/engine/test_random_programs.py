"""Slots and units that idle, penalties and freezing, drawn at random, step by step as in plain PyTorch."""

from __future__ import annotations

import pytest

from tests.support.random_programs import difference, drawn


@pytest.mark.parametrize("seed", range(24))
def test_a_random_program_is_that_of_plain_pytorch(seed: int) -> None:
    program = drawn(seed)
    problem = difference(program)
    assert not problem, f"{program}\n{problem}"
