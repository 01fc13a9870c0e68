"""A model that is sharded in either of the two ways: wrapped, or in place."""

from __future__ import annotations

from typing import Any

import flatfsdp
from flatfsdp.engine.wrap import WrapPolicy

WAYS = ["wrapped", "in place"]
"""For `sharded`."""


def sharded(way: str, model: Any, policy: WrapPolicy, **options: Any) -> Any:
    """The model, with a unit for each module that the policy picks, and one for the rest."""
    if way == "wrapped":
        return flatfsdp.auto_wrap(model, policy, **options)
    return flatfsdp.shard(model, policy, **options)
