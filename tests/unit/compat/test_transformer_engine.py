"""What FlatFSDP asks of Transformer Engine's layers, which are not installed on CPUs."""

from __future__ import annotations

import pytest
from torch import nn

from flatfsdp.compat.transformer_engine import requantize_in_backward


class Layer(nn.Module):
    """Finds out once whether FSDP2 has sharded it, as Transformer Engine's layers do."""

    @property
    def is_fsdp2(self) -> bool:
        if not hasattr(self, "_is_fsdp2"):
            self._is_fsdp2 = False
        return self._is_fsdp2


def test_all_layers_are_told() -> None:
    model = nn.Sequential(Layer(), nn.Sequential(Layer(), nn.Linear(2, 2)))
    assert not model[0].is_fsdp2
    requantize_in_backward(model)
    assert model[0].is_fsdp2 and model[1][0].is_fsdp2


def test_a_model_without_such_layers_is_refused() -> None:
    with pytest.raises(ValueError, match="no module of this Sequential is a layer of Transformer Engine"):
        requantize_in_backward(nn.Sequential(nn.Linear(2, 2)))
