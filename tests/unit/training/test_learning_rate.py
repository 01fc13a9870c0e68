"""The learning rate of the training loop: up, and then down to zero."""

from __future__ import annotations

import pytest

from flatfsdp.training.gpt import TrainSettings


def test_it_rises_and_falls_linearly() -> None:
    rates = [TrainSettings(steps=8, lr=1.0, warm_up=4).lr_at(step) for step in range(8)]
    assert rates == pytest.approx([1 / 4, 2 / 4 * 7 / 8, 3 / 4 * 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8])
    assert TrainSettings(steps=8, lr=1.0).lr_at(0) == 1.0
