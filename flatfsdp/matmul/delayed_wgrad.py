"""Weight gradients that a backward leaves for later: until a layer's `backward_dw` is called.

In:   from each backward, the product of a weight's gradient, not computed yet (`linear_map.py`).
Out:  the same product, so the same bits, in the weight's `main_grad` or `.grad`.

A pipeline's schedule can fill bubbles with them, as nothing waits for them before the optimizer does.  What
they are computed from is kept until then.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable

import torch
from torch import Tensor, nn

Product = Callable[[], Tensor | None]
"""Gives the gradient, or adds it to main_grad and gives None."""


class DelayedWgrads:
    """Of one layer: for each weight, by its name in messages, oldest backward first."""

    def __init__(self) -> None:
        self._products: defaultdict[str, deque[Product]] = defaultdict(deque)

    def put(self, name: str, product: Product) -> None:
        self._products[name].append(product)

    @torch.no_grad()
    def compute_oldest(self, name: str, weight: nn.Parameter) -> None:
        """
        Raises:
            RuntimeError: if there is none.
        """
        if not self._products[name]:
            raise RuntimeError(
                f"{name}: no backward has left a weight gradient; call backward_dw() once for each call of "
                "the layer, after its backward"
            )
        grad = self._products[name].popleft()()
        if grad is not None:
            weight.grad = grad if weight.grad is None else weight.grad.add_(grad)
