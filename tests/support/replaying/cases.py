"""Models whose microbatches may be replayed, how they are sharded, and their data."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flatfsdp import Debug, Precision, by_class, shard
from flatfsdp.engine.api.wrap import WrapPolicy
from flatfsdp.fp8 import BlockScaling, CurrentScaling, autocast
from flatfsdp.layers import convert
from tests.support.ecosystem.families import FAMILIES, VOCAB, Family
from tests.support.fp8_layers import SHORT, TOKENS, WIDTH, Block, Stack, seeded
from tests.support.meshes import replicating


class Plain(nn.Module):
    """A block of PyTorch's layers, with dropout and small gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(torch.tanh(self.up(self.norm(x)))))


def net() -> nn.Module:
    return nn.Sequential(Plain(), Plain(), nn.Linear(WIDTH, WIDTH))


Change = Callable[[Any], object]


def nothing(_model: Any) -> None:
    pass


def compile_blocks(model: Any) -> None:
    for module in model.modules():
        if isinstance(module, Plain):
            # Otherwise each compiled model chooses its kernels by timing them, and they sum in other orders.
            module.compile(options={"deterministic": True})


def recompute(model: Any, **options: Any) -> None:
    """Blocks, with their dropout, run again in the backward."""
    for block in model.modules():
        if isinstance(block, Plain):
            block.forward = partial(checkpoint, block.forward, **{"use_reentrant": False, **options})  # type: ignore[method-assign]


def recompute_layers(model: Any) -> None:
    model.gradient_checkpointing_enable()


def convert_all(model: Any) -> None:
    convert(model, filter=lambda layer, name: name != "lm_head")


def on_all_ranks() -> dict[str, Any]:
    return {"mesh": replicating()}


def hybrid() -> dict[str, Any]:
    return {"mesh": dist.init_device_mesh("cuda", (2, dist.get_world_size() // 2))}


class Case(NamedTuple):
    """A model, and how it is sharded.

    Attributes:
        reshard: ZeRO-3, or ZeRO-2.
        count: microbatches of a step.
        recipe: of FP8 layers; None for a model in bf16.
        stores: weights are in FP8 in the flat buffers.
        family: of Hugging Face; None for models of our own.
        poison: what is freed is overwritten.
        built: what is done to the model before it is sharded.
        ready: what is done to it afterwards.
        spread: further options of sharding, made on the ranks.
        reduces_every: gradients are reduced in each microbatch.
        wire: what gradients are sent in.
    """

    name: str
    reshard: bool
    count: int
    recipe: Any = None
    stores: bool = False
    family: Family | None = None
    poison: bool = False
    built: Change = nothing
    ready: Change = nothing
    spread: Callable[[], dict[str, Any]] = dict
    reduces_every: bool = False
    wire: torch.dtype = torch.float32

    @property
    def policy(self) -> WrapPolicy:
        return by_class(Plain, Block) if self.family is None else self.family.is_unit

    def model(self, device: str = "cpu") -> Any:
        if self.family is not None:
            module = self.family.build()
        else:
            module = seeded(net if self.recipe is None else Stack)
        self.built(module)
        computes_in_fp32 = self.recipe is not None and self.family is None
        model = shard(
            module.to(device),
            self.policy,
            precision=Precision(
                compute=torch.float32 if computes_in_fp32 else torch.bfloat16,
                fp8_weights=CurrentScaling() if self.stores else None,
                reduce=self.wire,
            ),
            reshard_after_forward=self.reshard,
            grad_sync="every" if self.reduces_every else "last",
            debug=Debug(poison_on_free=self.poison),
            **self.spread(),
        )
        self.ready(model)
        return model

    def loss(self, model: Any, x: Tensor) -> Tensor:
        with autocast(self.recipe is not None, recipe=self.recipe):
            if self.family is not None:
                return model(input_ids=x, labels=x).loss
            return model(x).float().square().mean()

    def microbatch(self, model: Any) -> Callable[[Tensor], Tensor]:
        def run(x: Tensor) -> Tensor:
            loss = self.loss(model, x)
            loss.backward()
            return loss.detach()

        return run

    def batch(self, rank: int, step: int, index: int, tokens: int = TOKENS, device: str = "cpu") -> Tensor:
        """The inputs of one microbatch: [tokens, WIDTH], or token ids [1, tokens]."""
        if self.family is None:
            return batch(rank, step, index, tokens, device)
        generator = _generator(rank, step, index)
        return torch.randint(1, VOCAB, (1, tokens), generator=generator).to(device)


def batch(rank: int, step: int, index: int, tokens: int = TOKENS, device: str = "cpu") -> Tensor:
    return torch.randn(tokens, WIDTH, generator=_generator(rank, step, index)).to(device)


def _generator(rank: int, step: int, index: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 * rank + 10 * step + index)


CASES = [
    *(Case(f"bf16 {reshard} {count}", reshard, count) for reshard in (True, False) for count in (1, 2, 4)),
    Case("poison", True, 3, poison=True),
    *(Case(f"delayed {reshard}", reshard, 3, SHORT) for reshard in (True, False)),
    Case("current", True, 3, CurrentScaling()),
    Case("block, poison", True, 2, BlockScaling(), poison=True),
    *(
        Case(f"stored {reshard}", reshard, count, SHORT, stores=True)
        for reshard, count in ((True, 1), (False, 3))
    ),
    *(
        Case(f"every {reshard} {count}", reshard, count, reduces_every=True)
        for reshard, count in ((True, 4), (False, 2))
    ),
    Case("every, poison, bf16 sent", True, 3, poison=True, reduces_every=True, wire=torch.bfloat16),
    Case("every, stored, bf16 sent", False, 3, SHORT, stores=True, reduces_every=True, wire=torch.bfloat16),
]

_SIZES = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}
LLAMA = FAMILIES["Llama"]._replace(sizes={**FAMILIES["Llama"].sizes, **_SIZES})
FUSED = LLAMA._replace(is_fused=True)
DROPPING = LLAMA._replace(sizes={**LLAMA.sizes, "attention_dropout": 0.1})
DROPPING_FUSED = DROPPING._replace(is_fused=True)
HUGGING_FACE = [
    Case("Llama", True, 2, family=LLAMA),
    Case("Llama, dropout", False, 1, family=DROPPING),
    Case("fused", True, 4, family=FUSED, poison=True),
    Case("fused, dropout", True, 2, family=DROPPING_FUSED),
    Case("fused, delayed", False, 3, SHORT, family=FUSED),
    Case("fused, stored", True, 1, SHORT, True, FUSED),
    Case("converted", True, 2, SHORT, family=LLAMA, built=convert_all),
    Case("fused, recomputed", True, 2, family=FUSED, built=recompute_layers),
    Case("dropout, recomputed", True, 2, family=DROPPING_FUSED, built=recompute_layers),
    Case("delayed, recomputed", True, 2, SHORT, family=FUSED, built=recompute_layers),
    Case("stored, recomputed", True, 2, SHORT, True, FUSED, built=recompute_layers),
]

ON_GPUS = [
    Case("compiled", True, 3, ready=compile_blocks),
    Case("recomputed", True, 3, built=recompute),
    Case("recomputed, ZeRO-2", False, 2, built=recompute),
    Case("recomputed, reentrant", True, 2, built=partial(recompute, use_reentrant=True)),
    Case("recomputed, nothing drawn again", True, 2, built=partial(recompute, preserve_rng_state=False)),
    Case("data parallel", True, 3, spread=on_all_ranks),
]
"""Cases for which a tape cannot stand for a graph: it does not know how random numbers are drawn."""
