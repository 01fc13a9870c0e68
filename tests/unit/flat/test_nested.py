from __future__ import annotations

import gc
import weakref
from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.utils import _pytree as pytree

from flatfsdp.flat.nested import cast_fp32, map_tensors, tensors_in


@dataclass
class Output:
    hidden: torch.Tensor
    extra: dict[str, object]


def test_tensors_are_found_at_any_depth() -> None:
    a, b, c, d = (torch.full((), float(i)) for i in range(4))
    value = (a, [{"x": b}, "text", None], Output(c, {"y": (d, 3)}), Output)
    assert [t.item() for t in tensors_in(value)] == [0.0, 1.0, 2.0, 3.0]


class Pair(NamedTuple):
    left: torch.Tensor
    right: object


def test_only_fp32_tensors_are_cast_and_gradients_flow() -> None:
    x = torch.ones(2, requires_grad=True)
    others = [torch.ones(2, dtype=dtype) for dtype in (torch.float64, torch.float16, torch.int64, torch.bool)]
    cast, *same = cast_fp32((x, *others, "text", None), torch.bfloat16)
    assert cast.dtype == torch.bfloat16
    assert all(ours is theirs for ours, theirs in zip(same, (*others, "text", None), strict=True))
    cast.sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.float32


def test_tuples_keep_their_class_and_are_copied_only_if_they_are_cast() -> None:
    x, tokens = torch.ones(2), torch.arange(2)
    pair, inner = cast_fp32((Pair(x, tokens), (tokens, (x,))), torch.bfloat16)
    assert (type(pair), pair.left.dtype, pair.right) == (Pair, torch.bfloat16, tokens)
    assert inner[1][0].dtype == torch.bfloat16
    largest = cast_fp32(x.view(1, 2).max(1), torch.bfloat16)
    assert (largest.values.dtype, largest.indices.dtype) == (torch.bfloat16, torch.int64)
    packed = torch.nn.utils.rnn.pack_sequence([x])
    assert cast_fp32(packed, torch.bfloat16).data.dtype == torch.bfloat16
    for value in ((tokens, x.shape), (), Pair(tokens, None)):
        assert cast_fp32(value, torch.bfloat16) is value


def test_what_a_forward_may_write_to_stays_the_callers() -> None:
    for value in ([torch.ones(2)], {"k": torch.ones(2)}, Output(torch.ones(2), {})):
        assert cast_fp32((value,), torch.bfloat16)[0] is value


def test_tensors_are_not_kept_until_python_collects_cycles() -> None:
    tensor = torch.ones(2)
    alive = weakref.ref(tensor)
    gc.disable()
    try:
        map_tensors(lambda each: each, (tensor, {"same": tensor}))
        del tensor
        assert alive() is None
    finally:
        gc.enable()


def to_bf16(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.bfloat16() if tensor.is_floating_point() else tensor


@dataclass(frozen=True)
class Batch:
    hidden: torch.Tensor
    tokens: torch.Tensor
    losses: list[torch.Tensor]


def test_dataclasses_are_cast_and_what_needs_no_cast_is_not_copied() -> None:
    losses: list[torch.Tensor] = []
    batch = Batch(torch.ones(2), torch.arange(2), losses)
    cast, again = map_tensors(to_bf16, (batch, {"losses": losses}))
    assert (cast.hidden.dtype, batch.hidden.dtype) == (torch.bfloat16, torch.float32)
    assert cast.tokens is batch.tokens
    assert cast.losses is again["losses"] is losses
    assert map_tensors(lambda each: each, batch) is batch


@dataclass
class Both(OrderedDict[str, torch.Tensor]):
    """A dataclass whose fields are also items, like the outputs of transformers."""

    hidden: torch.Tensor

    def __post_init__(self) -> None:
        self["hidden"] = self.hidden


def test_a_dataclass_that_pytree_knows_is_made_by_its_rule() -> None:
    pytree.register_pytree_node(
        Both, lambda value: (list(value.values()), None), lambda values, _: Both(*values)
    )
    cast = map_tensors(to_bf16, Both(torch.ones(2)))
    assert cast.hidden is cast["hidden"]
    assert cast.hidden.dtype == torch.bfloat16
