"""Attention on a GPU leaves PyTorch's own choice of backends unchanged."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.gpu.marks import NEEDS_GPU

pytestmark = NEEDS_GPU

PLAIN = "torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)"
OURS = "attention(x, x, x, None, is_causal=True, dropout=0.0, scale=None)"
MASKED = "attention(x, x, x, x[..., :1, :] > 0, is_causal=False, dropout=0.0, scale=None)"


def order_after(*calls: str) -> str:
    """PyTorch's order of backends in a process that only makes these calls."""
    program = f"""
import torch
from flatfsdp.layers.attention.sdpa import attention
x = torch.randn(1, 2, 64, 64, dtype=torch.bfloat16, device="cuda")
{"; ".join(calls)}
print(torch._C._get_sdp_priority_order())
"""
    found = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    return found.stdout


@pytest.mark.parametrize("first", [OURS, MASKED], ids=["causal", "masked"])
def test_the_order_of_backends_stays_that_of_pytorch(first: str) -> None:
    """PyTorch determines it when it first chooses a backend, and ours may run before that."""
    assert order_after(first) == order_after(PLAIN)
    assert order_after(first, PLAIN) == order_after(PLAIN)
