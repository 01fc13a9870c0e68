"""TRL's trainers on FlatFSDP: each says in all its figures what the plain one says under DDP."""

from __future__ import annotations

import contextlib
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from flatfsdp.contract.claimed import is_unit
from tests.support.ecosystem.launched import launched
from tests.support.ecosystem.preferences import adapted, base, judge, lora, samples, save_base, tokenizer
from tests.support.ranks import on_ranks

pytestmark = pytest.mark.skipif(
    any(find_spec(name) is None for name in ("trl", "peft", "accelerate")), reason="needs TRL and PEFT"
)

PREFERENCES = ("prompt", "chosen", "rejected")
GENERATION = {"num_generations": 4, "per_device_train_batch_size": 4, "max_completion_length": 8, "beta": 0.1}
"""Of trainers that generate, and compare the completions of a prompt; beta needs a reference."""
TIMES = ("runtime", "_per_second", "step_time")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_base(tmp_path / "base")
    return tmp_path


def arguments(kind: str, folder: Path, **options: Any) -> Any:
    import trl

    common = {
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "disable_tqdm": True,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 3,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "save_strategy": "no",
    }
    return getattr(trl, f"{kind}Config")(output_dir=str(folder / "out"), **{**common, **options})


def plain(kind: str) -> Any:
    import trl

    return getattr(trl, f"{kind}Trainer")


def flat(kind: str) -> Any:
    from flatfsdp.compat import trl

    return getattr(trl, f"Flat{kind}Trainer")


def sharding_others() -> Any:
    from flatfsdp.compat.transformers.trainer import FlatArguments

    return FlatArguments(shard_others=True)


def figures(trainer: Any) -> list[dict[str, float]]:
    """All that was printed, except for how long it took."""
    return [
        {key: value for key, value in log.items() if not key.endswith(TIMES)}
        for log in trainer.state.log_history
    ]


def assert_same_figures(found: Any, expected: Any, count: int) -> None:
    for ours, theirs in zip(figures(found), figures(expected), strict=True):
        # Losses of zero, as of RLOO, are rounding noise.
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=1e-6)
    assert len(figures(found)[0]) >= count


def by_length(completions: list[str], **_: Any) -> list[float]:
    return [float(len(each)) for each in completions]


class Case(NamedTuple):
    """A program.

    Attributes:
        kind: of trainer.
        columns: of its data.
        figures: how many of them a step has, at least.
        start: the model: "base", "adapted", or "path".
        reference: whether the reference is given to the trainer; otherwise TRL makes what it needs.
        adds_adapters: whether the trainer is given `peft_config`.
        shards_others: whether references and reward models are sharded.
        options: of the trainer's configuration.
    """

    kind: str
    columns: tuple[str, ...]
    figures: int
    start: str = "base"
    reference: bool = False
    adds_adapters: bool = False
    shards_others: bool = False
    options: dict[str, Any] = {}

    def made(self, trainer: Any, folder: Path, **further: Any) -> Any:
        models = {"base": base, "adapted": adapted, "path": str}
        generates = self.kind in ("GRPO", "RLOO")
        if self.reference:
            further["ref_model"] = base(folder / "base")
        if self.adds_adapters:
            further["peft_config"] = lora()
        if generates:
            further |= {"reward_funcs": [by_length, judge()], "reward_processing_classes": [None, tokenizer()]}
        if self.options.get("eval_strategy"):
            further["eval_dataset"] = samples(*self.columns)
        return trainer(
            models[self.start](folder / "base"),
            args=arguments(self.kind, folder, **(GENERATION if generates else {}), **self.options),
            train_dataset=samples(*self.columns),
            processing_class=tokenizer(),
            **further,
        )


EVALUATING = {"eval_strategy": "steps", "eval_steps": 2}
CASES = {
    "SFT": Case("SFT", ("text",), 8, options=EVALUATING),
    "SFT of a path, with peft_config": Case("SFT", ("text",), 8, start="path", adds_adapters=True),
    "DPO": Case("DPO", PREFERENCES, 16, options=EVALUATING),
    "DPO, with a reference that is sharded": Case(
        "DPO", PREFERENCES, 16, reference=True, shards_others=True, options={"loss_type": ["ipo"]}
    ),
    "DPO of an adapted model": Case("DPO", PREFERENCES, 16, start="adapted"),
    "KTO": Case("KTO", ("prompt", "completion", "label"), 15),
    "GRPO": Case("GRPO", ("prompt",), 25, shards_others=True),
    "GRPO of an adapted model": Case("GRPO", ("prompt",), 25, start="adapted"),
    "RLOO": Case("RLOO", ("prompt",), 25, start="path"),
}


@pytest.mark.parametrize("name", CASES)
@on_ranks(2)
def test_figures_are_those_of_ddp(rank: int, world_size: int, folder: Path, name: str) -> None:
    case = CASES[name]
    with launched(rank, world_size):
        expected = case.made(plain(case.kind), folder)
        expected.train()
        found = case.made(flat(case.kind), folder, flat=sharding_others() if case.shards_others else None)
        assert is_unit(found.model)
        found.train()
        assert_same_figures(found, expected, case.figures)
        others = [getattr(found, "ref_model", None), *getattr(found, "reward_funcs", [])]
        others = [each for each in others if isinstance(each, torch.nn.Module)]
        assert [is_unit(each) for each in others] == [case.shards_others] * len(others)
        assert bool(others) == (case.kind != "SFT" and case.start != "adapted" or case.kind == "GRPO")
