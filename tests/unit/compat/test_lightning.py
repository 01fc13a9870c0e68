"""The Lightning strategies without Lightning, or without its Trainer."""

from __future__ import annotations

import importlib
import sys

import pytest


@pytest.mark.parametrize(("module", "package"), [("fabric", "lightning-fabric"), ("trainer", "lightning$")])
def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, module: str, package: str) -> None:
    face = "flatfsdp.compat.lightning"
    if module == "trainer":
        pytest.importorskip(face)
    for name in [name for name in sys.modules if name.startswith(f"{face}.{module}")]:
        monkeypatch.delitem(sys.modules, name)
    if module == "fabric":
        monkeypatch.delitem(sys.modules, face, raising=False)
    for name in (
        "lightning",
        "lightning.fabric",
        "lightning.pytorch",
        "lightning_fabric",
        "pytorch_lightning",
    ):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ModuleNotFoundError, match=f"pip install {package}"):
        importlib.import_module(f"{face}.{module}")
