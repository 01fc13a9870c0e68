"""Real Transformer Engine layers inside FlatFSDP: the bits of the same layers, unsharded.

Their weight gradients are fused into FP32 `main_grad`, as Megatron-LM runs them, in bf16 and in FP8 with
delayed, current and block scaling.  The unsharded ones have FP32 master weights, and FP32 sums of gradients.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatfsdp import Precision, by_class, checkpoint, microbatches, shard
from tests.support.gpu.marks import NEEDS_GPU
from tests.support.models import update, whole_grads
from tests.support.ranks import on_ranks

pytestmark = [
    *NEEDS_GPU,
    pytest.mark.skipif(find_spec("transformer_engine") is None, reason="needs Transformer Engine"),
]

WORLD_SIZES = [1, 2, 4]
HIDDEN, HEADS, SEQ, BATCH, STEPS = 256, 4, 128, 2, 3
BF16 = Precision(compute=torch.bfloat16)


def engine() -> Any:
    """Transformer Engine, with kernels that repeat their bits."""
    os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "0"
    import transformer_engine.pytorch as te

    return te


def forget() -> None:
    """Transformer Engine lists all modules that ever ran, for the amaxes that it reduces."""
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    FP8GlobalStateManager.reset()


def recipe_named(name: str) -> Any:
    from transformer_engine.common import recipe

    return {
        "bf16": None,
        "delayed": recipe.DelayedScaling(amax_history_len=4),
        "current": recipe.Float8CurrentScaling(),
        "block": recipe.Float8BlockScaling(),
    }[name]


class Stack(nn.Module):
    """A few layers, and the mean square of what comes out."""

    def __init__(self, dtype: torch.dtype, recipe: str) -> None:
        super().__init__()
        te = engine()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            te.TransformerLayer(
                HIDDEN,
                4 * HIDDEN,
                HEADS,
                hidden_dropout=0.0,
                attention_dropout=0.0,
                layer_number=index + 1,
                self_attn_mask_type="causal",
                params_dtype=dtype,
                fuse_qkv_params=True,
                fuse_wgrad_accumulation=True,
                device="cuda",
            )
            for index in range(3)
        )
        self.recipe = recipe_named(recipe)

    def forward(self, x: Tensor, first: bool | None) -> Tensor:
        with self._region():
            for layer in self.layers:
                x = layer(x, is_first_microbatch=first)
        return x.float().square().mean()

    def _region(self) -> AbstractContextManager[object]:
        return nullcontext() if self.recipe is None else engine().autocast(enabled=True, recipe=self.recipe)


def layer_class() -> type[nn.Module]:
    found: type[nn.Module] = engine().TransformerLayer
    return found


def batches(step: int, count: int) -> list[Tensor]:
    """The same on all ranks, whose mean gradient is therefore each one's."""
    generator = torch.Generator().manual_seed(step)
    shape = (SEQ, BATCH, HIDDEN)
    return [torch.randn(shape, generator=generator).bfloat16().cuda() for _ in range(count)]


def first_of(index: int, cached: bool) -> bool | None:
    """What the layers are told: FP8 weights are cast in the first microbatch of a step, or in each."""
    return index == 0 if cached else None


class Unsharded:
    """Layers in bf16, FP32 master weights and FP32 sums of gradients, without any engine."""

    def __init__(self, recipe: str) -> None:
        wide = Stack(torch.float32, recipe)
        self.model = Stack(torch.bfloat16, recipe)
        self.masters = {name: nn.Parameter(p.detach().clone()) for name, p in wide.named_parameters()}
        self.optimizer = torch.optim.AdamW(self.masters.values(), lr=1e-3, foreach=False)
        self._cast()

    def _cast(self) -> None:
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(self.masters[name])

    def step(self, step: int, count: int, cached: bool) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Losses and gradients."""
        parameters = dict(self.model.named_parameters())
        for parameter in parameters.values():
            parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)  # type: ignore[attr-defined]
        losses = []
        for index, x in enumerate(batches(step, count)):
            loss = self.model(x, first_of(index, cached))
            (loss / count).backward()
            losses.append(loss.detach())
            for parameter in parameters.values():
                if parameter.grad is not None:
                    parameter.main_grad += parameter.grad.float()  # type: ignore[attr-defined]
                    parameter.grad = None
        grads = {name: parameter.main_grad for name, parameter in parameters.items()}  # type: ignore[attr-defined]
        for name, master in self.masters.items():
            master.grad = grads[name]
        self.optimizer.step()
        self._cast()
        return losses, grads


class Sharded:
    """The same layers in the hands of FlatFSDP."""

    def __init__(self, recipe: str, **options: Any) -> None:
        stack = Stack(torch.float32, recipe)
        self.model = shard(stack, by_class(layer_class()), precision=BF16, device="cuda", **options)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, foreach=False)

    def step(self, step: int, count: int, cached: bool) -> tuple[list[Tensor], dict[str, Tensor]]:
        losses = []
        for index, x in enumerate(microbatches(self.model, batches(step, count))):
            loss = self.model(x, first_of(index, cached))
            (loss / count).backward()
            losses.append(loss.detach())
        grads = whole_grads(self.model)
        update(self.optimizer)
        return losses, grads


def differing(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> list[str]:
    assert ours.keys() == theirs.keys()
    return [
        name for name in ours if not torch.equal(ours[name].cpu().view_as(theirs[name]), theirs[name].cpu())
    ]


@pytest.mark.parametrize("recipe", ["bf16", "delayed", "current", "block"])
@pytest.mark.parametrize("cached", [False, True], ids=["cast-each", "cast-first"])
@pytest.mark.parametrize("count", [1, 4], ids=["m1", "m4"])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@on_ranks(backend="nccl")
def test_bits_are_those_of_unsharded_layers(rank: int, recipe: str, cached: bool, count: int) -> None:
    forget()
    reference = Unsharded(recipe)
    expected = [reference.step(step, count, cached) for step in range(STEPS)]
    assert all(loss.isfinite() for losses, _ in expected for loss in losses)
    masters = {name: master.detach() for name, master in reference.masters.items()}
    for flag in (False, True):
        for reshard in (True, False):
            forget()
            run = Sharded(recipe, reshard_after_forward=reshard, optimize_backward_concat=flag)
            where = f"flag {flag}, reshard {reshard}"
            for step, (losses, grads) in enumerate(expected):
                found, found_grads = run.step(step, count, cached)
                assert [loss.item() for loss in found] == [loss.item() for loss in losses], (where, step)
                assert differing(found_grads, grads) == [], (where, step)
            state = checkpoint.full_state_dict(run.model)
            parameters = {key: value for key, value in state.items() if not key.endswith("_extra_state")}
            assert differing(parameters, masters) == [], where


@pytest.mark.parametrize("recipe", ["delayed", "current", "block"])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@on_ranks(backend="nccl")
def test_fp8_weights_are_freed_with_the_parameters(rank: int, recipe: str) -> None:
    weights = sum(p.numel() for p in Stack(torch.bfloat16, recipe).parameters() if p.dim() == 2)

    def held(reshard: bool) -> int:
        """Bytes between a forward and its backward that were not there before."""
        forget()
        run = Sharded(recipe, reshard_after_forward=reshard)
        run.step(0, 1, False)
        before = torch.cuda.memory_allocated()
        loss = run.model(*batches(1, 1), None)
        found = torch.cuda.memory_allocated() - before
        loss.backward()
        return found

    # One byte for the values and one for their transpose.
    assert held(False) - held(True) >= 1.9 * weights


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@on_ranks(backend="nccl")
def test_resumed_training_has_the_bits_of_one_that_was_not_interrupted(rank: int, tmp_path: Path) -> None:
    forget()
    whole = Sharded("delayed")
    expected = [whole.step(step, 2, True) for step in range(5)]
    forget()
    first = Sharded("delayed")
    for step in range(2):
        first.step(step, 2, True)
    checkpoint.save(tmp_path / "saved", first.model, first.optimizer)
    forget()
    second = Sharded("delayed")
    second.step(7, 2, True)
    checkpoint.load(tmp_path / "saved", second.model, second.optimizer)
    for step in range(2, 5):
        losses, grads = second.step(step, 2, True)
        assert [loss.item() for loss in losses] == [loss.item() for loss in expected[step][0]]
        assert differing(grads, expected[step][1]) == []
    scales = [state for state in scales_of(second.model) if state.numel() > 1]
    assert scales and all(map(torch.equal, scales, (s for s in scales_of(whole.model) if s.numel() > 1)))


def scales_of(model: nn.Module) -> Iterator[Tensor]:
    """Scales and histories of all layers."""
    for module in model.modules():
        meta = getattr(module, "fp8_meta", None) or {}
        for key in ("scaling_fwd", "scaling_bwd"):
            if hasattr(meta.get(key), "amax_history"):
                yield from (meta[key].scale, meta[key].amax_history)
