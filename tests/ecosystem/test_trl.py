"""TRL's trainers on FlatFSDP: each says in all its figures what the plain one says under DDP."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from flatfsdp.contract.claimed import is_unit
from tests.support.ecosystem.launched import launched, trainer_options
from tests.support.ecosystem.preferences import adapted, base, judge, lora, samples, save_base, tokenizer
from tests.support.ranks import on_ranks

pytestmark = pytest.mark.skipif(
    any(find_spec(name) is None for name in ("trl", "peft", "accelerate")), reason="needs TRL and PEFT"
)

PREFERENCES = ("prompt", "chosen", "rejected")
GENERATION = {"num_generations": 4, "per_device_train_batch_size": 4, "max_completion_length": 8, "beta": 0.1}
"""Of trainers that generate, and compare the completions of a prompt; beta needs a reference."""
TIMES = ("runtime", "_per_second", "step_time")
OURS = ("tokens_per_s", "tflops_per_rank", "peak_gib", "data_s", "data_share")
"""Figures that `FlatTrainer` logs beside those of TRL."""


@contextmanager
def started(rank: int, world_size: int, folder: Path) -> Iterator[None]:
    """A rank that a launcher has started, with a model in `folder / "base"`."""
    # On a loaded machine this takes longer than a rank waits for another in a collective.
    from trl import SFTTrainer  # noqa: F401

    with launched(rank, world_size):
        if rank == 0:
            save_base(folder / "base")
        dist.barrier()
        yield


def arguments(kind: str, folder: Path, **options: Any) -> Any:
    import trl

    common = trainer_options(bf16=False, max_steps=3, output_dir=str(folder / "out"))
    return getattr(trl, f"{kind}Config")(**{**common, **options})


def plain(kind: str) -> Any:
    import trl

    return getattr(trl, f"{kind}Trainer")


def flat(kind: str) -> Any:
    from flatfsdp.compat import trl
    from flatfsdp.compat.transformers.trainer import FlatTrainer

    if kind == "Reward":
        # As docs/trl.md makes a class of any other trainer.
        return type("FlatRewardTrainer", (FlatTrainer, plain(kind)), {})
    return getattr(trl, f"Flat{kind}Trainer")


def sharding_others() -> Any:
    from flatfsdp.compat.transformers.trainer import FlatArguments

    return FlatArguments(shard_others=True)


def figures(trainer: Any) -> list[dict[str, float]]:
    """All that was printed, except for how long it took."""
    return [
        {key: value for key, value in log.items() if not key.endswith((*TIMES, *OURS))}
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
        start: the model: "base", "adapted", "judge" (it rewards), or "path".
        reference: whether the reference is given to the trainer; otherwise TRL makes what it needs.
        adds_adapters: whether the trainer is given `peft_config`.
        others: how many models there are beside the trained one: a reference, a reward model.
        shards_others: whether these are sharded.
        options: of the trainer's configuration.
    """

    kind: str
    columns: tuple[str, ...]
    figures: int
    start: str = "base"
    reference: bool = False
    adds_adapters: bool = False
    others: int = 0
    shards_others: bool = False
    options: Mapping[str, Any] = MappingProxyType({})

    def made(self, trainer: Any, folder: Path, **further: Any) -> Any:
        models = {"base": base, "adapted": adapted, "judge": lambda _: judge(), "path": str}
        generates = self.kind in ("GRPO", "RLOO")
        if self.reference:
            further["ref_model"] = base(folder / "base")
        if self.adds_adapters:
            further["peft_config"] = lora()
        if generates:
            further |= {
                "reward_funcs": [by_length, judge()],
                "reward_processing_classes": [None, tokenizer()],
            }
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
    "DPO": Case("DPO", PREFERENCES, 16, others=1, options=EVALUATING),
    "DPO, with a reference that is sharded": Case(
        "DPO", PREFERENCES, 16, reference=True, others=1, shards_others=True, options={"loss_type": ["ipo"]}
    ),
    "DPO of an adapted model": Case("DPO", PREFERENCES, 16, start="adapted"),
    "KTO": Case("KTO", ("prompt", "completion", "label"), 15, others=1),
    "GRPO": Case("GRPO", ("prompt",), 25, others=2, shards_others=True),
    "GRPO of an adapted model": Case("GRPO", ("prompt",), 25, start="adapted", others=1),
    "RLOO": Case("RLOO", ("prompt",), 25, start="path", others=2),
    "Reward": Case("Reward", ("chosen", "rejected"), 8, start="judge"),
}


@pytest.mark.parametrize("name", CASES)
@on_ranks(2, timeout=240.0)
def test_figures_are_those_of_ddp(rank: int, world_size: int, tmp_path: Path, name: str) -> None:
    case, folder = CASES[name], tmp_path
    with started(rank, world_size, folder):
        expected = case.made(plain(case.kind), folder)
        expected.train()
        found = case.made(flat(case.kind), folder, flat=sharding_others() if case.shards_others else None)
        assert is_unit(found.model)
        found.train()
        assert_same_figures(found, expected, case.figures)
        others = [getattr(found, "ref_model", None), *getattr(found, "reward_funcs", [])]
        others = [each for each in others if isinstance(each, torch.nn.Module)]
        assert [is_unit(each) for each in others] == [case.shards_others] * case.others


@on_ranks(2, timeout=240.0)
def test_reference_is_computed_before_training(rank: int, world_size: int, tmp_path: Path) -> None:
    import datasets

    with started(rank, world_size, tmp_path):
        trainers = []
        for make in (plain("DPO"), flat("DPO")):
            # On disk, since ranks share what is computed through files beside the data; each has its own.
            data = tmp_path / make.__name__
            if rank == 0:
                samples(*PREFERENCES).save_to_disk(data)
            dist.barrier()
            trainer = make(
                adapted(tmp_path / "base"),
                args=arguments("DPO", tmp_path, precompute_ref_log_probs=True),
                train_dataset=datasets.load_from_disk(str(data)),
                processing_class=tokenizer(),
            )
            trainer.train()
            trainers.append(trainer)
        expected, found = trainers
        assert_same_figures(found, expected, 16)
        assert "ref_chosen_logps" in found.train_dataset.column_names


@on_ranks(2, timeout=240.0)
def test_checkpoints_have_the_adapter_and_what_trl_adds(rank: int, world_size: int, tmp_path: Path) -> None:
    import peft

    case = Case(
        "GRPO",
        ("prompt",),
        25,
        start="path",
        adds_adapters=True,
        options={
            "max_steps": 1,
            "save_strategy": "steps",
            "save_steps": 1,
            "entropy_coef": 0.1,
            "entropy_coef_delta": 0.01,
            "use_adaptive_entropy": True,
        },
    )
    with started(rank, world_size, tmp_path):
        trained = case.made(flat("GRPO"), tmp_path)
        trained.train()
        loaded = peft.PeftModel.from_pretrained(base(tmp_path / "base"), tmp_path / "out" / "checkpoint-1")
        state = trained.model.state_dict()
        assert state.keys() == loaded.state_dict().keys()
        assert all(torch.equal(state[name], value) for name, value in loaded.state_dict().items())
        resumed = case._replace(options={**case.options, "max_steps": 2}).made(flat("GRPO"), tmp_path)
        resumed.train(resume_from_checkpoint=True)
        assert (trained.entropy_coef, resumed.entropy_coef) == pytest.approx((0.09, 0.08))


@on_ranks(2, timeout=240.0)
def test_only_other_models_are_moved_whole(rank: int, world_size: int, tmp_path: Path) -> None:
    with started(rank, world_size, tmp_path):
        model, reference = base(tmp_path / "base"), base(tmp_path / "base")
        with mock.patch.object(type(reference), "to", autospec=True, return_value=reference) as moved:
            trainer = flat("DPO")(
                model,
                reference,
                arguments("DPO", tmp_path),
                train_dataset=samples(*PREFERENCES),
                processing_class=tokenizer(),
            )
        assert [call.args for call in moved.call_args_list] == [(reference, trainer.accelerator.device)]


def refused() -> list[tuple[Case, dict[str, Any], str]]:
    """Programs, FlatArguments, and the expected words of the error."""
    dpo = Case("DPO", PREFERENCES, 0)
    return [
        (dpo._replace(options={"sync_ref_model": True}), {}, "sync_ref_model: it mixes whole parameters"),
        (dpo._replace(options={"activation_offloading": True}), {}, "gathered parameters for activations"),
        (dpo, {"replay": True}, "metrics would not run in replays"),
        (Case("GRPO", ("prompt",), 0, options={"cast_lm_head_to_fp32": True}), {}, "gathered in one dtype"),
    ]


@on_ranks(2, timeout=240.0)
def test_what_cannot_be_done_is_named(rank: int, world_size: int, tmp_path: Path) -> None:
    from flatfsdp.compat.transformers.trainer import FlatArguments

    with started(rank, world_size, tmp_path):
        for case, options, words in refused():
            with pytest.raises(ValueError, match=words):
                case.made(flat(case.kind), tmp_path, flat=FlatArguments(**options))
