"""Ranks that wait for each other: all of them go on, or none."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch.distributed as dist

from flatfsdp.comm import meeting
from flatfsdp.comm.meeting import meet


class TwoRanks(NamedTuple):
    """One of two, without a process group."""

    rank: int
    size: int = 2
    name: str = "both"

    @property
    def global_ranks(self) -> list[int]:
        return [4, 5]


class Early:
    """A store as a rank sees it that asked a moment ago, when nobody had given up."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def add(self, key: str, amount: int) -> int:
        return 0 if key.endswith("given up") else self._store.add(key, amount)


def test_nobody_goes_on_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    monkeypatch.setattr(meeting, "default_store", lambda: store)
    first, second = TwoRanks(0), TwoRanks(1)
    alone = r"saving is collective, and rank 5 did not call it within 0 s; call it on all ranks"
    with pytest.raises(RuntimeError, match=alone):
        meet(first, "saving", 0.05)
    monkeypatch.setattr(meeting, "default_store", lambda: Early(store))
    with pytest.raises(RuntimeError, match="another one had given up waiting"):
        meet(second, "saving", 0.05)
