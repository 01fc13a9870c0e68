"""Lets PyTorch's functions for state dicts find those of FlatFSDP, at no cost for who does not call them."""

from __future__ import annotations

from flatfsdp.engine.units import UnitModule

_ASKED = "_fqn_modifiers"
"""The method of a module that they call first, before anything is read or gathered."""


def connect_state_dicts() -> None:
    """Gives sharded modules that method."""
    setattr(UnitModule, _ASKED, _names_that_differ)


def _names_that_differ(_unit: UnitModule) -> dict[str, str]:
    """In state dicts, attribute by attribute: none."""
    from flatfsdp.compat.torch_state_dicts.functions import install

    install()
    return {}
