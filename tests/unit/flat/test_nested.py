from __future__ import annotations

import gc
import weakref
from collections import OrderedDict
from dataclasses import dataclass

import torch
from torch.utils import _pytree as pytree

from flatfsdp.flat.nested import cast_floats, map_tensors, tensors_in


@dataclass
class Output:
    hidden: torch.Tensor
    extra: dict[str, object]


def test_tensors_are_found_at_any_depth() -> None:
    a, b, c, d = (torch.full((), float(i)) for i in range(4))
    value = (a, [{"x": b}, "text", None], Output(c, {"y": (d, 3)}), Output)
    assert [t.item() for t in tensors_in(value)] == [0.0, 1.0, 2.0, 3.0]


def test_only_floating_point_tensors_are_cast_and_gradients_flow() -> None:
    x = torch.ones(2, requires_grad=True)
    cast, tokens, mask, rest = cast_floats((x, torch.arange(2), torch.tensor([True]), "text"), torch.bfloat16)
    assert (cast.dtype, tokens.dtype, mask.dtype, rest) == (torch.bfloat16, torch.int64, torch.bool, "text")
    cast.sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.float32


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


@dataclass(frozen=True)
class Batch:
    hidden: torch.Tensor
    tokens: torch.Tensor
    losses: list[torch.Tensor]


def test_dataclasses_are_cast_and_what_needs_no_cast_is_not_copied() -> None:
    losses: list[torch.Tensor] = []
    batch = Batch(torch.ones(2), torch.arange(2), losses)
    cast, again = cast_floats((batch, {"losses": losses}), torch.bfloat16)
    assert (cast.hidden.dtype, batch.hidden.dtype) == (torch.bfloat16, torch.float32)
    assert cast.tokens is batch.tokens
    assert cast.losses is again["losses"] is losses
    assert cast_floats(batch, torch.float32) is batch


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
    cast = cast_floats(Both(torch.ones(2)), torch.bfloat16)
    assert cast.hidden is cast["hidden"]
    assert cast.hidden.dtype == torch.bfloat16
