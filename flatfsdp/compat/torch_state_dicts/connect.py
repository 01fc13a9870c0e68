"""Connects PyTorch's state-dict functions to FlatFSDP's, without an import cost for other programs."""

from __future__ import annotations

from flatfsdp.engine.units import UnitModule

_ASKED = "_fqn_modifiers"
"""The module method that PyTorch calls first, before it reads or gathers anything."""


def connect_state_dicts() -> None:
    """Gives sharded modules the method that installs FlatFSDP's functions."""
    setattr(UnitModule, _ASKED, _names_that_differ)


def _names_that_differ(_unit: UnitModule) -> dict[str, str]:
    """Installs the functions, and reports that no attribute has another name in state dicts."""
    from flatfsdp.compat.torch_state_dicts.functions import install

    install()
    return {}
