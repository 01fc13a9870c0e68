"""Mask types and sliding windows: which keys a query sees, and the boolean mask where one is needed.

In an `attention_mask`, True means that the key is masked out (Transformer Engine's convention).  Internally,
and for torch's attention, True means that the key is visible.

    attn_mask_type                      window             mask tensor
    no_mask, padding, arbitrary         (-1, -1), or any   with padding, arbitrary, or a window
    causal, padding_causal              (-1, 0), (n, 0)    with padding_causal, or a window of n

Query i sees keys i - left to i + right; -1 means no limit.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor

MASK_TYPES = ("no_mask", "causal", "padding", "padding_causal", "arbitrary")
WITH_MASK = ("padding", "padding_causal", "arbitrary")
UNLIMITED, CAUSAL = (-1, -1), (-1, 0)

Window = tuple[int, int]


def resolve_window(attn_mask_type: str, window_size: Window | None) -> Window:
    """The effective window of a mask type; causal ones end at the query itself.

    Raises:
        ValueError: for an unknown mask type, or a window that contradicts it.
    """
    if attn_mask_type not in MASK_TYPES:
        raise ValueError(f"attn_mask_type is {attn_mask_type!r}; it must be one of {', '.join(MASK_TYPES)}")
    window = UNLIMITED if window_size is None else window_size
    is_pair = isinstance(window, Sequence) and len(window) == 2
    if not is_pair or not all(isinstance(size, int) and size >= -1 for size in window):
        raise ValueError(f"window_size is {window_size}; it must be two numbers >= 0, or -1 for no limit")
    left, right = window
    if not attn_mask_type.endswith("causal"):
        return left, right
    if right > 0:
        raise ValueError(
            f"window_size is {window_size}, which shows keys after the query; attn_mask_type="
            f"{attn_mask_type!r} does not, so make its right side 0 or choose another type"
        )
    return left, 0


def visible_keys(
    attention_mask: Tensor | None, attn_mask_type: str, shape: tuple[int, int, int, int]
) -> Tensor | None:
    """The mask of visible keys, broadcastable to `shape`; None if all keys are visible.

    Args:
        attention_mask: True where a key is masked out; [batch, 1, 1, keys] for padding types.
        attn_mask_type: one of `MASK_TYPES`.
        shape: batch, heads, queries, keys.

    Raises:
        ValueError: if the mask is missing, not allowed for this type, or of the wrong dtype or shape.
    """
    if attn_mask_type not in WITH_MASK:
        if attention_mask is not None:
            raise ValueError(f"{attn_mask_type!r} takes no attention_mask; {', '.join(WITH_MASK)} do")
        return None
    if attention_mask is None:
        raise ValueError(f"attn_mask_type={attn_mask_type!r} needs an attention_mask: True is masked out")
    if attention_mask.dtype != torch.bool:
        raise ValueError(f"attention_mask is {attention_mask.dtype}; it must be bool: True is masked out")
    whole = (shape[0], 1, 1, shape[3]) if attn_mask_type != "arbitrary" else shape
    sizes = tuple(attention_mask.shape)
    if len(sizes) != 4 or any(size not in (1, limit) for size, limit in zip(sizes, whole, strict=True)):
        raise ValueError(
            f"attention_mask has shape {sizes}; {attn_mask_type!r} needs {whole}, or 1 for any size"
        )
    return attention_mask.logical_not()


class WindowMasks:
    """Makes window masks and keeps the latest ones: bool [queries, keys], True where a query sees a key."""

    def __init__(self, capacity: int = 2) -> None:
        self._capacity = capacity
        self._masks: OrderedDict[tuple[int, int, Window, torch.device], Tensor] = OrderedDict()

    def get(self, queries: int, keys: int, window: Window, device: torch.device) -> Tensor:
        """The mask of a window, made on first use."""
        key = (queries, keys, window, device)
        if key not in self._masks:
            self._masks[key] = _window_mask(*key)
        self._masks.move_to_end(key)
        while len(self._masks) > self._capacity:
            self._masks.popitem(last=False)
        return self._masks[key]


def _window_mask(queries: int, keys: int, window: Window, device: torch.device) -> Tensor:
    left, right = window
    # Not an inference tensor: an evaluation may make the mask, and training may use it next.
    with torch.inference_mode(False):
        query = torch.arange(queries, device=device)[:, None]
        key = torch.arange(keys, device=device)[None, :]
        seen = torch.ones(queries, keys, dtype=torch.bool, device=device)
        if left >= 0:
            seen &= key >= query - left
        if right >= 0:
            seen &= key <= query + right
        return seen
