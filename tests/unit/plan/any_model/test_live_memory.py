"""Bytes of tensors on the meta device: what counts, from when, and until when."""

from __future__ import annotations

import torch
from torch import Tensor

from flatfsdp.plan.any_model.live_memory import BLOCK, LiveMemory, allocated
from flatfsdp.plan.any_model.places import FORWARD, StepPlace

HERE = StepPlace("layer", FORWARD)
META = torch.device("meta")


def seen(memory: LiveMemory, *tensors: Tensor) -> int:
    memory.see(tensors, HERE)
    return memory.live


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
    assert memory.peak == 8 * BLOCK


def test_a_peak_is_found_again() -> None:
    def step(memory: LiveMemory) -> None:
        first = torch.empty(BLOCK, dtype=torch.uint8, device=META)
        seen(memory, first)
        second = torch.empty(3 * BLOCK, dtype=torch.uint8, device=META)
        seen(memory, second)
        del first
        seen(memory, torch.empty(1, device=META))

    memory = LiveMemory()
    step(memory)
    memory.begin()
    step(memory)
    assert (memory.peak, memory.peak_at) == (4 * BLOCK, 1)
    found: list[int] = []
    memory.begin(memory.peak_at, lambda: found.append(sum(each.nbytes for each in memory.allocations())))
    step(memory)
    assert found == [4 * BLOCK]


def test_what_is_watched_comes_and_goes_with_its_storage() -> None:
    memory = LiveMemory()
    buffer = torch.empty(BLOCK, dtype=torch.uint8, device=META)
    assert seen(memory, buffer) == BLOCK
    memory.watch([buffer])
    assert memory.live == BLOCK
    storage = buffer.untyped_storage()
    storage.resize_(0)
    assert memory.live == 0
    storage.resize_(5 * BLOCK)
    assert seen(memory, buffer[:0]) == 5 * BLOCK
    assert memory.allocations() == []
