"""Without Lightning Fabric."""

from __future__ import annotations

import importlib
import sys

import pytest


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "flatfsdp.compat.lightning", raising=False)
    for name in ("lightning", "lightning.fabric", "lightning_fabric"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ModuleNotFoundError, match=r"lightning_fabric.*pip install lightning-fabric"):
        importlib.import_module("flatfsdp.compat.lightning")
