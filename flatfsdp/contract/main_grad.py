"""The place of a weight gradient that its layer accumulates itself.

A weight offers the place in one of three ways:

    claim_main_grad()   FlatFSDP's parameters: a slot of the unit's flat buffer, and whether to overwrite it
    get_main_grad()     with `__fsdp_param__`, as in Megatron-FSDP: a buffer, allocated on first use
    main_grad           any owner's: a buffer of the weight's shape, which the owner zeroes

The place is FP32, or bf16 where it holds the gradient of a single microbatch, which is sent in bf16.  A layer
rounds what it adds to bf16 once: it sums in FP32 what it computes in parts.

The last two are Transformer Engine's contract: layers add to the buffer, unless is_first_microbatch or the
weight's `overwrite_main_grad` is True, and set `grad_added_to_main_grad` on a weight that has it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from flatfsdp.contract.attribute import Attribute
from flatfsdp.kernels.grad.accumulate import TARGET_DTYPES

GRAD = Attribute[Tensor | None]("grad", None)
"""PyTorch's own attribute, for a reduced gradient in the dtype of its parameter."""

MAIN_GRAD = Attribute[Tensor | None]("main_grad", None)
"""Buffer of the parameter's shape, FP32 or bf16: a slot of the engine's flat buffer, or another owner's
buffer; also a reduced gradient that is wider than its parameter."""

GET_MAIN_GRAD = Attribute[Callable[[], Tensor] | None]("get_main_grad", None)
"""Function that returns a buffer to add to, for layers that find `IS_FSDP_PARAM`."""

IS_FSDP_PARAM = Attribute[bool]("__fsdp_param__", False)

CLAIM_MAIN_GRAD = Attribute[Callable[[], tuple[Tensor, bool]] | None]("claim_main_grad", None)
"""Function that returns the slot, and whether nothing has landed there in this step."""

OVERWRITE_MAIN_GRAD = Attribute[bool]("overwrite_main_grad", False)

GRAD_ADDED_TO_MAIN_GRAD = Attribute[bool]("grad_added_to_main_grad", False)


class MainGradSlot(NamedTuple):
    """Place for one weight's gradient.

    Attributes:
        target: buffer, FP32 or bf16, of the weight's shape, contiguous.
        first: whether to overwrite its contents instead of adding to them.
    """

    target: Tensor
    first: bool


def claim(weight: Tensor, name: str, is_first_microbatch: bool | None) -> MainGradSlot:
    """Claims the slot that this backward has to write or add to.

    Raises:
        RuntimeError: if the weight has no slot.
        TypeError: if the slot is neither FP32 nor bf16.
        ValueError: if it is not contiguous and of the weight's shape.
    """
    owned = CLAIM_MAIN_GRAD.of(weight)
    if owned is not None:
        slot = MainGradSlot(*owned())
    else:
        slot = MainGradSlot(_buffer(weight, name), _overwrites(weight, is_first_microbatch))
        if GRAD_ADDED_TO_MAIN_GRAD.is_on(weight):
            GRAD_ADDED_TO_MAIN_GRAD.leave(weight, True)
    target = slot.target
    if target.dtype not in TARGET_DTYPES:
        raise TypeError(
            f"main_grad of {name} is {target.dtype}; make it FP32 (Precision(accumulate=torch.float32)), or "
            "bf16 if it holds the gradient of a single microbatch"
        )
    if target.shape != weight.shape or not target.is_contiguous():
        raise ValueError(
            f"main_grad of {name} has shape {tuple(target.shape)} and strides {target.stride()}; it has to "
            f"be contiguous and of the weight's shape {tuple(weight.shape)}"
        )
    return slot


def _buffer(weight: Tensor, name: str) -> Tensor:
    get = GET_MAIN_GRAD.of(weight)
    buffer = get() if get is not None and IS_FSDP_PARAM.is_on(weight) else None
    if buffer is None:
        buffer = MAIN_GRAD.of(weight)
    if buffer is None:
        raise RuntimeError(
            f"{name} has no main_grad, into which fuse_wgrad_accumulation=True accumulates; wrap the model "
            "with FlatFSDP, or set weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)"
        )
    return buffer


def _overwrites(weight: Tensor, is_first_microbatch: bool | None) -> bool:
    return is_first_microbatch is True or OVERWRITE_MAIN_GRAD.of(weight)
