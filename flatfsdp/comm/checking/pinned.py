"""Pinned CPU memory that a GPU writes to, so that the host sees what arrives without waiting."""

from __future__ import annotations

import torch
from torch import Tensor


def on_gpu(pinned: Tensor, device: torch.device) -> Tensor:
    """Maps pinned CPU memory, int64 and contiguous, to a tensor on `device` without a copy.

    NCCL reads and writes there, so that the host sees what arrives without waiting for the device.

    Raises:
        RuntimeError: if the device cannot address the memory.
    """
    alias = torch.as_tensor(_CudaArray(pinned), device=device)
    if alias.data_ptr() != pinned.data_ptr():
        raise RuntimeError(
            f"pinned CPU memory is not addressable on {device}, where collectives say what they are for; "
            "pass debug=Debug(check_collectives=False)"
        )
    return alias


class _CudaArray:
    """Object with Numba's array interface, from which PyTorch makes a tensor; the driver tells the device."""

    def __init__(self, pinned: Tensor) -> None:
        # Kept, as the tensor that PyTorch makes from this object holds the object, and not the memory.
        self._pinned = pinned
        self.__cuda_array_interface__ = {
            "shape": tuple(pinned.shape),
            "typestr": "<i8",
            "data": (pinned.data_ptr(), False),
            "strides": None,
            "version": 3,
        }
