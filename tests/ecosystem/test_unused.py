"""FlatTrainer leaves alone what a step does not use, as Trainer does: a vision tower, experts, a head."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatfsdp import by_class
from tests.support.ecosystem.families import VOCAB, needs_transformers
from tests.support.ecosystem.launched import launched, trainer_options
from tests.support.ranks import on_ranks

pytestmark = [
    needs_transformers,
    pytest.mark.skipif(find_spec("accelerate") is None, reason="needs accelerate"),
]

IMAGE, PATCHES = VOCAB - 1, 4
Sample = dict[str, Tensor]


def trained_by_both(
    folder: Path, make: Callable[[], Any], samples: list[Sample], steps: int, **flat: Any
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """The weights at the start, after Trainer under DistributedDataParallel, and after FlatTrainer.

    One sample a rank, microbatch and step, in order; AdamW, with weight decay and clipping.
    """
    import transformers

    from flatfsdp.compat.transformers.trainer import FlatArguments, FlatTrainer

    options = trainer_options(max_steps=steps, per_device_train_batch_size=1, weight_decay=0.1)
    options |= {"lr_scheduler_type": "constant", "train_sampling_strategy": "sequential"}
    arguments = transformers.TrainingArguments(str(folder), ddp_find_unused_parameters=True, **options)
    start = {name: value.clone() for name, value in make().state_dict().items()}
    plain = transformers.Trainer(make(), arguments, train_dataset=samples)
    ours = FlatTrainer(make(), arguments, train_dataset=samples, flat=FlatArguments(**flat))
    plain.train()
    ours.train()
    return start, plain.model.state_dict(), ours.model.state_dict()


def farthest(state: dict[str, Tensor], other: dict[str, Tensor], part: str = "") -> float:
    """The largest difference of two weights in this part of a model."""
    assert state.keys() == other.keys()
    return max(float((value - other[name]).abs().max()) for name, value in state.items() if part in name)


# ---- images in the first step alone ------------------------------------------------------------------------


def llava() -> Any:
    import transformers

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = transformers.LlamaConfig(
        **sizes, num_key_value_heads=2, vocab_size=VOCAB, max_position_embeddings=32
    )
    vision = transformers.CLIPVisionConfig(**sizes, image_size=8, patch_size=4, num_channels=3)
    torch.manual_seed(0)
    config = transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_index=IMAGE)
    return transformers.LlavaForConditionalGeneration(config)


def conversation(index: int, *, with_image: bool) -> Sample:
    generator = torch.Generator().manual_seed(index)
    tokens = torch.randint(0, IMAGE, (8,), generator=generator)
    if not with_image:
        return {"input_ids": tokens, "labels": tokens}
    tokens = torch.cat([torch.full((PATCHES,), IMAGE), tokens])
    labels = tokens.masked_fill(tokens == IMAGE, -100)
    pixels = torch.randn(3, 8, 8, generator=generator)
    return {"input_ids": tokens, "labels": labels, "pixel_values": pixels}


@pytest.mark.parametrize("flag", [True, False], ids=["on", "off"])
@on_ranks(1, 2)
def test_steps_of_text_alone_leave_the_vision_tower(
    rank: int, world_size: int, tmp_path: Path, flag: bool
) -> None:
    a_step = 2 * world_size
    samples = [conversation(index, with_image=index < a_step) for index in range(4 * a_step)]
    with launched(rank, world_size):
        for steps in (1, 4):
            start, plain, ours = trained_by_both(
                tmp_path, llava, samples, steps, optimize_backward_concat=flag
            )
            for part in ("vision_tower", "projector", ""):
                assert farthest(ours, plain, part) <= 1e-6, (steps, part)
            assert farthest(plain, start, "vision_tower") > 5e-3


# ---- experts as units, and a head that nobody uses ---------------------------------------------------------


class Expert(nn.Linear):
    pass


class Experts(nn.Module):
    """One of three experts for each sample; a second head is there for later."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(4, 8)
        self.experts = nn.ModuleList(Expert(8, 8) for _ in range(3))
        self.head, self.idle_head = nn.Linear(8, 1), nn.Linear(8, 1)

    def forward(self, x: Tensor, expert: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = torch.tanh(self.experts[int(expert[0])](self.inlet(x)))
        return {"loss": (self.head(hidden)[:, 0] - labels).square().mean()}


def experts() -> nn.Module:
    torch.manual_seed(0)
    return Experts()


@pytest.mark.parametrize("flag", [True, False], ids=["on", "off"])
@on_ranks(1, 2)
def test_experts_in_turn_and_an_idle_head(rank: int, world_size: int, tmp_path: Path, flag: bool) -> None:
    """One expert a step: its momentum and decay rest while others are used."""
    a_step = 2 * world_size
    samples = []
    for index in range(6 * a_step):
        values = torch.randn(5, generator=torch.Generator().manual_seed(index))
        expert = torch.tensor((0, 1, 2, 2, 0, 0)[index // a_step])
        samples.append({"x": values[:4], "expert": expert, "labels": values[4]})
    with launched(rank, world_size):
        start, plain, ours = trained_by_both(
            tmp_path, experts, samples, 6, policy=by_class(Expert), optimize_backward_concat=flag
        )
    assert farthest(ours, plain) <= 1e-6
    assert farthest(ours, start, "idle_head") == 0 < farthest(ours, start, "experts.1")
