"""The learning rate of `convergence.py`: up, and then down to zero."""

from __future__ import annotations

import importlib

import pytest
import torch
from torch import nn

from tests.support.programs import ROOT


def rates(monkeypatch: pytest.MonkeyPatch, warm_up: int) -> list[float]:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    decaying = importlib.import_module("lib.hf_training").decaying
    parameter = nn.Parameter(torch.zeros(()))
    parameter.grad = torch.ones(())
    optimizer = decaying(8, warm_up, [parameter], lr=1.0)
    found = []
    for _ in range(8):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
    return found


def test_it_rises_and_falls_linearly(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [1 / 4, 2 / 4 * 7 / 8, 3 / 4 * 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8]
    assert rates(monkeypatch, 4) == pytest.approx(expected)
    assert rates(monkeypatch, 0)[0] == 1.0
