"""Side streams, beside the compute stream."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


class SideStream:
    """A CUDA stream beside the compute stream; on CPU the calling thread itself, in order.

    Its work starts after the compute stream's work so far (`after_compute`), and the compute stream
    waits for its event before it uses or frees what it touched.  So memory may be allocated on
    either stream and freed on the other, nothing needs `record_stream`, and the host never waits.
    """

    def __init__(self, device: torch.device) -> None:
        # -1 is high priority: the compute stream is going to wait for this work.
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None

    def after_compute(self) -> AbstractContextManager[Any]:
        """Context that runs kernels on this stream, after all work of the compute stream so far."""
        if self._stream is None:
            return nullcontext()
        index = self._stream.device.index
        compute = torch.cuda.current_stream(index)
        self._stream.wait_stream(compute)
        # `torch.cuda.stream` switches the device, too, and back.
        if torch.cuda.current_device() != index:
            return torch.cuda.stream(self._stream)
        return _Instead(self._stream, compute)

    def synchronize(self) -> None:
        """Makes the host wait for this stream's work so far."""
        if self._stream is not None:
            self._stream.synchronize()

    def mark(self) -> torch.cuda.Event | None:
        """Records an event after this stream's work so far; None on CPU."""
        return None if self._stream is None else self._stream.record_event()


class _Instead:
    """Switches to a stream in a third of the time of `torch.cuda.stream`, as the caller knows both."""

    def __init__(self, side: torch.cuda.Stream, compute: torch.cuda.Stream) -> None:
        self._side = side
        self._compute = compute

    def __enter__(self) -> None:
        torch.cuda.set_stream(self._side)

    def __exit__(self, *exc: object) -> None:
        torch.cuda.set_stream(self._compute)


def compute_waits_for(event: torch.cuda.Event | None, device: torch.device) -> None:
    """Makes the current stream of `device` wait for `event`; the host goes on.

    `device` need not be the current one.
    """
    if event is not None:
        # By index: looking up a device's index takes longer than the rest.
        torch.cuda.current_stream(device.index).wait_event(event)
