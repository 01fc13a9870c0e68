"""Many gradients into slices of one flat buffer, against one `accumulate` each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from flatfsdp.kernels.grad import accumulate_many as module
from flatfsdp.kernels.grad.accumulate_many import accumulate_many
from flatfsdp.kernels.shared import tables
from flatfsdp.kernels.shared.tables import kept_table
from flatfsdp.kernels.shared.tiles import find
from tests.support.gpu.waiting import without_synchronisation
from tests.support.kernels.compiling import compile_for_hopper
from tests.support.kernels.running import both, check_operator

BOTH = both(module.reference, module.launch)
TILE = find("accumulate_many", torch.bfloat16, 1)
BLOCK = TILE.cols
NUMELS = [5, 16, 123, BLOCK, BLOCK + 1, 2 * BLOCK + 48, 1]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def slices(numels: list[int], device: str, gap: int = 16) -> tuple[Tensor, list[Tensor]]:
    """A flat buffer full of NaN, and slices of it that start at multiples of `gap`."""
    starts = [0]
    for numel in numels:
        starts.append(starts[-1] + -(-numel // gap) * gap)
    buffer = torch.full((starts[-1],), torch.nan, device=device)
    return buffer, [buffer[start : start + numel] for start, numel in zip(starts, numels, strict=False)]


def random_grads(numels: list[int], device: str) -> list[Tensor]:
    return [torch.randn(numel, device=device).to(DTYPES[index % 3]) for index, numel in enumerate(numels)]


@BOTH
@pytest.mark.parametrize("gap", [16, 1], ids=["aligned", "unaligned"])
def test_every_microbatch_is_one_exact_addition(run: Any, gap: int, device: str) -> None:
    buffer, targets = slices(NUMELS, device, gap)
    expected = [torch.empty_like(target) for target in targets]
    first = [True, True, False, True, True, True, True]
    targets[2].fill_(3.0)
    expected[2].fill_(3.0)
    for microbatch in range(3):
        grads = random_grads(NUMELS, device)
        run(targets[0], targets, grads, first if microbatch == 0 else [False] * len(NUMELS))
        for old, grad, is_first in zip(expected, grads, first, strict=True):
            wide = grad.float()
            old.copy_(wide if is_first and microbatch == 0 else old + wide)
    for ours, exact in zip(targets, expected, strict=True):
        assert torch.equal(ours, exact)
    assert buffer.isnan().sum() == buffer.numel() - sum(NUMELS), "the gaps are left alone"


@BOTH
def test_special_values(run: Any, device: str) -> None:
    specials = torch.tensor([0.0, -0.0, 2.0**-149, torch.inf, -torch.inf, torch.nan], device=device)
    _, targets = slices([6], device)
    run(targets[0], targets, [specials], [True])
    assert torch.equal(torch.signbit(targets[0][:5]), torch.signbit(specials[:5]))
    torch.testing.assert_close(targets[0], specials, rtol=0, atol=0, equal_nan=True)
    run(targets[0], targets, [specials.bfloat16()], [False])
    expected = specials + specials.bfloat16().float()
    torch.testing.assert_close(targets[0], expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_host_does_not_wait() -> None:
    """Tables of calls in flight are unchanged: nobody writes into their pinned memory too early."""
    grads = random_grads(NUMELS, "cuda")
    results = [slices(NUMELS, "cuda")[1] for _ in range(50)]
    accumulate_many(results[0], grads, [True] * len(grads))  # compiles
    with without_synchronisation():
        torch.cuda._sleep(10_000_000)
        for targets in results:
            accumulate_many(targets, grads, [True] * len(grads))
    for targets in results:
        assert all(torch.equal(ours, grad.float()) for ours, grad in zip(targets, grads, strict=True))


def test_matrices_and_an_empty_list() -> None:
    target, grad = torch.full((3, 5), torch.nan), torch.randn(3, 5).bfloat16()
    accumulate_many([target], [grad], [True])
    assert torch.equal(target, grad.float())
    accumulate_many([], [], [])


def test_what_does_not_fit_is_named() -> None:
    good, grad = torch.zeros(4), torch.zeros(4, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="2 targets, 1 grads and 2 entries"):
        accumulate_many([good, good], [grad], [True, True])
    with pytest.raises(ValueError, match=r"targets\[1\] is torch\.float64"):
        accumulate_many([good, good.double()], [grad, grad], [True, True])
    with pytest.raises(ValueError, match=r"grads\[1\] is torch\.bfloat16 \(2, 2\)"):
        accumulate_many([good, good], [grad, grad.view(2, 2)], [True, True])
    with pytest.raises(ValueError, match=r"grads\[0\] is torch\.float64"):
        accumulate_many([good], [good.double()], [True])
    with pytest.raises(ValueError, match=r"grads\[0\] is torch\.bfloat16 \(4, 4\) .* contiguous"):
        accumulate_many([torch.zeros(4, 4)], [torch.zeros(4, 4, dtype=torch.bfloat16).t()], [True])


def test_compiled_and_faked_calls_go_through_the_operator() -> None:
    targets, grads = [torch.zeros(4), torch.zeros(7)], [torch.randn(4), torch.randn(7).bfloat16()]
    check_operator("accumulate_many_", torch.empty(0), targets, grads, [True, False])


def test_it_compiles_for_hopper_with_wide_loads_and_without_spills() -> None:
    types, constants = {"table_ptr": "*i64", "n": "i32"}, {"N_POW2": 512, "ALIGNED": True}
    kernel = "grad.accumulate_many._accumulate_many_kernel"
    compiled = compile_for_hopper(kernel, types, constants, tile=TILE)
    # 16 bytes: FP32 gradient and target in quarters of the elements, 16-bit gradient in eighths.
    assert compiled.count("ld.global.v4.b32") == compiled.elements // 4 * 2 + compiled.elements // 8
    assert compiled.count("st.global.v4.b32") == compiled.elements // 4


def test_a_table_is_made_once_for_the_same_numbers() -> None:
    fields, device = torch.randint(2**40, (3, 5)).tolist(), torch.device("cpu")
    table = kept_table(fields, device)
    assert table.tolist() == fields
    assert kept_table([list(row) for row in fields], device) is table
    fields[1][2] += 16
    assert kept_table(fields, device).tolist() == fields
    assert table.tolist() != fields


def test_a_table_of_a_capture_is_copied_beside_it_and_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a stream that is being captured nothing is copied, and replays read the table later."""
    device, beside, copied = torch.device("cuda", 0), mock.Mock(), []

    def device_table(fields: Any, of: torch.device) -> Tensor:
        assert current == [beside] and of == device
        copied.append(fields)
        return torch.tensor(fields)

    @contextmanager
    def stream(chosen: Any) -> Iterator[None]:
        current.append(chosen)
        yield
        current.pop()

    current: list[Any] = []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda of: beside)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(tables, "device_table", device_table)
    tables._table_of_graphs.cache_clear()
    found = [kept_table([[7, 7, number]], device) for number in (1, 2, 1)]
    assert found[0] is found[2] and found[1] is not found[0]
    assert len(copied) == beside.synchronize.call_count == 2
    tables._table_of_graphs.cache_clear()
