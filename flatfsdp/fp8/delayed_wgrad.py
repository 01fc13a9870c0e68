"""Weight gradients that a backward leaves for later: until a layer's `backward_dw` is called.

In:   from each backward, the product of a weight's gradient, not computed yet (`linear.py`).
Out:  the same product, so the same bits, in the weight's `main_grad` or `.grad`.

A pipeline's schedule can fill bubbles with them, as nothing waits for them before the optimizer does.  What
they are computed from is kept until then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor, nn

Product = Callable[[], Tensor | None]
"""Gives the gradient, or adds it to main_grad and gives None."""


class DelayedWgrads:
    """Of one weight, oldest backward first.

    Args:
        name: the weight's, for messages.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._products: deque[Product] = deque()

    def put(self, product: Product) -> None:
        self._products.append(product)

    @torch.no_grad()
    def compute_oldest(self, weight: nn.Parameter) -> None:
        """
        Raises:
            RuntimeError: if there is none.
        """
        if not self._products:
            raise RuntimeError(
                f"{self._name}: no backward has left a weight gradient; call backward_dw() once for each "
                "call of the layer, after its backward"
            )
        grad = self._products.popleft()()
        if grad is not None:
            weight.grad = grad if weight.grad is None else weight.grad.add_(grad)


def mark_delayed(weight: nn.Parameter) -> None:
    """In Transformer Engine's words, for engines that wait for gradients: none comes in the backward."""
    weight.skip_backward_post_hook = True  # type: ignore[attr-defined]


def is_delayed(weight: Tensor) -> bool:
    """Of any layer's weight."""
    return getattr(weight, "skip_backward_post_hook", False)
