"""fairscale's gradient scaler, on one rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flatfsdp.compat.fairscale import ShardedGradScaler


@pytest.fixture
def scaler(monkeypatch: pytest.MonkeyPatch) -> ShardedGradScaler:
    # On the CPU even if there is a GPU, like the losses here.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return ShardedGradScaler()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(), (3,)])
def test_a_narrow_loss_is_scaled_in_fp32(
    scaler: ShardedGradScaler, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    weight = torch.full(shape, 2.0, dtype=torch.float32, requires_grad=True)
    scaled = scaler.scale(weight.to(dtype))
    assert scaled.dtype == torch.float32
    assert torch.equal(scaled, torch.full(shape, 2.0 * 2**16))
    (scaled / 2**16).sum().backward()
    assert weight.grad is not None and (weight.grad == 1.0).all()


@pytest.mark.parametrize("kind", [list, tuple, iter])
def test_several_losses_keep_their_structure(scaler: ShardedGradScaler, kind: Any) -> None:
    losses: list[Tensor] = [torch.ones((), dtype=torch.float16), torch.ones((), dtype=torch.float64)]
    scaled = scaler.scale(kind(losses))
    assert kind is iter or type(scaled) is kind
    found = list(scaled)
    assert [loss.dtype for loss in found] == [torch.float32, torch.float64]
    assert all(loss == 2.0**16 for loss in found)


def test_what_is_no_loss_is_refused(scaler: ShardedGradScaler) -> None:
    with pytest.raises(ValueError, match="must be a Tensor"):
        scaler.scale(1.0)


def test_a_disabled_scaler_leaves_the_loss_alone() -> None:
    loss = torch.ones((), dtype=torch.float16)
    assert ShardedGradScaler(enabled=False).scale(loss) is loss
