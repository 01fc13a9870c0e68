"""Without `precision=`, a model computes in the dtype of most of its parameters; what is trained is FP32."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor, nn

from flatfsdp import Precision, by_class, checkpoint, microbatches, shard
from flatfsdp.optim import AdamW
from tests.support.ranks import on_ranks

IN_BF16 = Precision(compute=torch.bfloat16)


class Block(nn.Module):
    """A router in FP32 beside a large layer in bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(16, 16, bias=False)
        self.layer = nn.Linear(16, 64).bfloat16()
        self.out = nn.Linear(64, 16).bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        gate = self.router(x.to(self.router.weight.dtype)).to(self.layer.weight.dtype)
        return self.out(self.layer(x.to(self.layer.weight.dtype) * gate))


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block())


def trained(module: nn.Module, rank: int) -> list[Tensor]:
    optimizer = AdamW([p for p in module.parameters() if p.requires_grad], lr=1e-2)
    torch.manual_seed(rank)
    for batch in microbatches(module, torch.randn(3, 4, 16).unbind()):
        module(batch).float().square().mean().backward()
    optimizer.step()
    return [p.detach().clone() for p in module.parameters()]


@on_ranks(1, 2)
def test_a_bf16_model_computes_in_bf16_and_is_updated_in_fp32(rank: int) -> None:
    default, given = (shard(model(), by_class(Block), **o) for o in ({}, {"precision": IN_BF16}))
    assert default(torch.randn(4, 16)).dtype == torch.bfloat16
    assert {p.dtype for p in default.parameters()} == {torch.float32}
    assert all(map(torch.equal, trained(default, rank), trained(given, rank)))


def test_parameters_in_fp32_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "flatfsdp"):
        shard(model(), by_class(Block))
    (record,) = [each.getMessage() for each in caplog.records]
    assert "the model computes in bf16" in record
    assert (
        "2 are FP32, and are rounded to bf16 where they are used: 0.router.weight, 1.router.weight. Pass"
        in record
    )


@on_ranks(1, 2)
def test_a_model_that_is_mostly_fp32_computes_in_fp32(rank: int) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(16, 64), nn.Linear(64, 4).bfloat16())
    assert shard(module, by_class(nn.Linear))(torch.ones(2, 16)).dtype == torch.float32


def test_fp16_raises() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).half())
    with pytest.raises(ValueError, match=r"parameter 1\.weight is fp16.*bf16.*GradScaler"):
        shard(module, by_class(nn.Linear))
    shard(module, by_class(nn.Linear), precision=Precision(compute=torch.float16))


def adapted() -> nn.Sequential:
    """A frozen base in bf16 with trained layers in FP32, as PEFT makes adapters."""
    module = model()
    for block in module:
        block.router.weight.data = block.router.weight.bfloat16()
    module.requires_grad_(False)
    return module.append(nn.Sequential(nn.Linear(16, 4), nn.Linear(4, 16)))


@on_ranks(1, 2, 3)
def test_what_is_frozen_takes_two_bytes_and_keeps_its_values(rank: int, tmp_path: object) -> None:
    before = adapted().state_dict()
    module = shard(adapted(), by_class(Block))
    assert {p.dtype for p in module.parameters() if not p.requires_grad} == {torch.bfloat16}
    assert {p.dtype for p in module.parameters() if p.requires_grad} == {torch.float32}
    report = module.memory_report()
    frozen = [row for row in report.rows if row.dtype == torch.bfloat16 and "master" in row.buffer]
    assert frozen and not any("compute" in row.buffer and row.total >= frozen[0].total for row in report.rows)
    given = shard(adapted(), by_class(Block), precision=IN_BF16)
    assert all(map(torch.equal, trained(module, rank), trained(given, rank)))
    checkpoint.save(f"{tmp_path}/saved", module)
    again = shard(adapted(), by_class(Block))
    checkpoint.load(f"{tmp_path}/saved", again)
    for loaded in (module, again):
        after = checkpoint.full_state_dict(loaded)
        if rank == 0:
            assert all(torch.equal(after[n], v) for n, v in before.items() if not n.startswith("2."))


@on_ranks(1, 2)
def test_what_has_no_wide_master_is_not_trained_later(rank: int) -> None:
    module = shard(adapted(), by_class(Block))
    module.requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"with frozen parameters, which it keeps in torch\.bfloat16"):
        module(torch.ones(2, 16))
    # The way that the message names.
    plain = adapted().requires_grad_(True)
    module = shard(plain, by_class(Block))
    module[0].requires_grad_(False)
    module(torch.ones(2, 16)).sum().backward()
    module[0].requires_grad_(True)
    module(torch.ones(2, 16)).sum().backward()
    assert all(p.grad is not None for p in module[0].parameters() if p.numel())
