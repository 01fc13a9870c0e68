"""Figures of a training run as JSON that every parser accepts.

In:   numbers, some of which may be NaN or infinite; text, lists and dicts.
Out:  text.
Next: commands and examples print it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any


def to_json(value: Any, *, indent: int | None = None) -> str:
    """Serializes to JSON with null for NaN and infinite numbers, which JSON lacks; paths become strings."""
    return json.dumps(_plain(value), indent=indent, default=str, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value
