"""Ways to copy a model, or a state."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch


def by_pickle(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


def by_torch_save(value: Any, weights_only: bool = False) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)
