"""Bytes of tensors on the meta device: what counts, from when, and until when."""

from __future__ import annotations

import torch
from torch import Tensor

from flatfsdp.plan.trace.live_memory import BLOCK, LiveMemory, allocated

META = torch.device("meta")


def seen(memory: LiveMemory, *tensors: Tensor) -> int:
    memory.see(tensors, "here")
    return memory.live


def blocks(count: int) -> Tensor:
    return torch.empty(count * BLOCK, dtype=torch.uint8, device=META)


def test_memory_is_there_until_its_last_tensor_is_gone() -> None:
    memory = LiveMemory()
    large = torch.empty(1000, device=META)
    assert seen(memory, large) == allocated(4000) == 8 * BLOCK
    view = large[10:20]
    # Views have no memory of their own, and keep what they look at.
    assert seen(memory, view, view.t()) == 8 * BLOCK
    del large
    assert memory.live == 8 * BLOCK
    del view
    assert memory.live == 0
    assert memory.fullest()[None].total() == 8 * BLOCK


def test_the_fullest_moment_of_each_part_says_what_was_there() -> None:
    memory = LiveMemory()
    early = blocks(2)
    seen(memory, early)
    memory.begin()
    memory.part = "first"
    first = blocks(1)
    memory.see([first], "small")
    second = blocks(3)
    memory.see([second], ("not", "known"))
    del first
    seen(memory, blocks(1))
    memory.part = "second"
    memory.name(second, "named later")
    seen(memory, blocks(1))
    memory.name(second, "of another use")
    memory.note("end")
    assert memory.fullest() == {
        "first": {"here": 2 * BLOCK, "small": BLOCK, "named later": 3 * BLOCK},
        "second": {"here": 3 * BLOCK, "named later": 3 * BLOCK},
        "end": {"here": 2 * BLOCK, "of another use": 3 * BLOCK},
    }


def test_what_is_watched_comes_and_goes_with_its_storage() -> None:
    memory = LiveMemory()
    buffer = blocks(1)
    assert seen(memory, buffer) == BLOCK
    memory.watch("buffer", [buffer])
    assert memory.live == BLOCK
    storage = buffer.untyped_storage()
    storage.resize_(0)
    assert memory.live == 0
    storage.resize_(5 * BLOCK)
    assert seen(memory, buffer[:0]) == 5 * BLOCK
    assert memory.fullest()[None] == {"buffer": 5 * BLOCK}
