"""Shards a model in either of the two forms: wrapped, or in place."""

from __future__ import annotations

from functools import partial
from typing import Any

import flatfsdp
from flatfsdp.engine.api.wrap import WrapPolicy

WAYS = {
    "wrapped": partial(flatfsdp.auto_wrap, optimize_backward_concat=False),
    "in place": flatfsdp.shard,
}


def sharded(way: str, model: Any, policy: WrapPolicy, **options: Any) -> Any:
    """The model, with a unit for each module that the policy picks, and one for the rest.

    Args:
        way: one of `WAYS`.
    """
    return WAYS[way](model, policy, **options)
