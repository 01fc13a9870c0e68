"""Weight gradients that a backward defers until a layer's `backward_dw` is called.

In:   from each backward, the GEMM of a weight's gradient, not run yet (`linear_map.py`).
Out:  the same GEMM, so bit-equal results, in the weight's `main_grad` or `.grad`.

A pipeline schedule can fill bubbles with them, because nothing before the optimizer needs them.  Their
operands are kept until then.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable

import torch
from torch import Tensor, nn

Wgrad = Callable[[], Tensor | None]
"""Computes the gradient and returns it, or adds it to main_grad and returns None."""


class DelayedWgrads:
    """A layer's deferred weight gradients, by the weights' names in messages, the oldest first."""

    def __init__(self) -> None:
        self._wgrads: defaultdict[str, deque[Wgrad]] = defaultdict(deque)

    def put(self, name: str, wgrad: Wgrad) -> None:
        """Defers a gradient."""
        self._wgrads[name].append(wgrad)

    @torch.no_grad()
    def compute_oldest(self, name: str, weight: nn.Parameter) -> None:
        """Computes the oldest gradient of a weight.

        Raises:
            RuntimeError: if there is none.
        """
        if not self._wgrads[name]:
            raise RuntimeError(
                f"{name}: no backward has left a weight gradient; call backward_dw() once for each call of "
                "the layer, after its backward"
            )
        grad = self._wgrads[name].popleft()()
        if grad is not None:
            weight.grad = grad if weight.grad is None else weight.grad.add_(grad)
