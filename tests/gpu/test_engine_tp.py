"""FlatFSDP around tensor-parallel layers over NCCL: bit-equal, one norm, portable checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from flatfsdp import Debug, FlatFSDP, Precision, auto_wrap, by_class, checkpoint, microbatches
from flatfsdp.fp8 import CurrentScaling, DelayedScaling
from flatfsdp.layers import TransformerLayer
from flatfsdp.models import Llama, LlamaConfig
from flatfsdp.optim import AdamW
from flatfsdp.parallel import ParallelMesh
from tests.support.gpu.marks import NEEDS_GPU
from tests.support.llamas import mesh_of
from tests.support.meshes import replicating
from tests.support.models import differing, repeatable, update
from tests.support.ranks import on_ranks

pytestmark = NEEDS_GPU
CONFIG = LlamaConfig(3, 1024, 2816, heads=8, kv_heads=4, vocab=4096, seq=512)
BF16 = Precision(compute=torch.bfloat16)
STORED = Precision(compute=torch.bfloat16, fp8_weights=CurrentScaling())
IN_LAYERS = Precision(compute=torch.bfloat16, fp8_weights="in_layers")


def build(mesh: ParallelMesh, recipe: Any = None, *, replicates: bool = False, **options: Any) -> FlatFSDP:
    split: dict[str, Any] = {"tp_group": mesh.tp_group} if mesh.tp_size > 1 else {}
    llama = Llama(
        CONFIG,
        recipe=recipe,
        fuse_wgrad_accumulation=True,
        sequence_parallel=mesh.tp_size > 1,
        device="cuda",
        **split,
    )
    options["mesh"] = replicating(mesh.dp_group) if replicates else mesh.dp
    return auto_wrap(
        llama, by_class(TransformerLayer), **split, **{"optimize_backward_concat": False, **options}
    )


def batches(mesh: ParallelMesh, seed: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(100 * seed + mesh.dp_rank)
    shape = (2, CONFIG.seq)
    return [
        tuple(torch.randint(0, CONFIG.vocab, shape, generator=generator).cuda() for _ in range(2))
        for _ in range(2)
    ]


def train(model: FlatFSDP, mesh: ParallelMesh) -> list[Tensor]:
    """Losses, gradients, norms and parameters of two steps."""
    optimizer = AdamW(model.parameters(), lr=1e-3, max_grad_norm=0.1)
    found = []
    for step in range(2):
        for tokens, targets in microbatches(model, batches(mesh, step)):
            loss = model(tokens, targets)
            loss.backward()
            found.append(loss.detach())
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        update(optimizer)
        norms = [torch.empty_like(optimizer.grad_norm) for _ in range(dist.get_world_size())]
        dist.all_gather(norms, optimizer.grad_norm)
        assert all(torch.equal(norm, norms[0]) for norm in norms)
        found += norms
    return found + [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize(
    "options",
    [
        {"precision": BF16},
        {"precision": BF16, "recipe": DelayedScaling(), "grad_sync": "every"},
        {"precision": STORED, "recipe": CurrentScaling(), "reshard_after_forward": False},
        {"precision": BF16, "cpu_offload": True},
        {"precision": BF16, "replicates": True},
    ],
    ids=["bf16", "fp8-every", "stored-zero2", "offload", "replicated"],
)
@on_ranks(4, backend="nccl")
@repeatable()
def test_the_flag_changes_no_bit(options: dict[str, Any]) -> None:
    mesh = mesh_of(pp=1, tp=2)
    off, on, again = (
        train(build(mesh, optimize_backward_concat=flag, debug=Debug(poison_on_free=True), **options), mesh)
        for flag in (False, True, True)
    )
    assert all(each.isfinite().all() for each in on)
    assert differing(on, again) == {}, "again"
    assert differing(off, on) == {}


@on_ranks(4, backend="nccl")
@repeatable()
def test_weights_stored_in_fp8_are_the_same_bits() -> None:
    mesh = mesh_of(pp=1, tp=2)
    runs = [
        train(build(mesh, CurrentScaling(), precision=precision, optimize_backward_concat=True), mesh)
        for precision in (STORED, IN_LAYERS)
    ]
    assert differing(*runs) == {}


@on_ranks(4, backend="nccl")
def test_a_checkpoint_is_read_by_another_arrangement(tmp_path: Path) -> None:
    """A checkpoint written by DP 2 x TP 2 is read by TP 4, and by DP 4."""
    folder = str(tmp_path)
    mesh = mesh_of(pp=1, tp=2)
    model = build(mesh, DelayedScaling(), precision=BF16)
    optimizer = AdamW(model.parameters(), lr=1e-3)
    for tokens, targets in microbatches(model, batches(mesh, 0)):
        model(tokens, targets).backward()
    optimizer.step()
    checkpoint.save(folder, model, optimizer)
    expected = checkpoint.full_state_dict(model)
    moments = checkpoint.full_optimizer_state_dict(model, optimizer)["state"]
    for tp in (4, 1):
        other = build(mesh_of(pp=1, tp=tp), DelayedScaling(), precision=BF16)
        resumed = AdamW(other.parameters(), lr=1.0)
        checkpoint.load(folder, other, resumed)
        found = checkpoint.full_state_dict(other)
        for name, value in expected.items():
            assert not isinstance(value, Tensor) or torch.equal(found[name], value), name
        for name, state in checkpoint.full_optimizer_state_dict(other, resumed)["state"].items():
            assert torch.equal(state["exp_avg"], moments[name]["exp_avg"]), name
