"""`FlatTrainer` with lanes: a training has the same bits on any number of ranks, also one that changes."""

from __future__ import annotations

from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, Subset, SubsetRandomSampler

from flatfsdp import shard
from flatfsdp.comm.lanes import Lanes
from flatfsdp.compat.transformers import policy_of
from tests.ecosystem.test_trainer import arguments, flat_arguments, flat_trainer
from tests.support.assertions import assert_raises
from tests.support.ecosystem import elastic_trainer
from tests.support.ecosystem.families import FAMILIES, Text, needs_transformers
from tests.support.ecosystem.launched import launched
from tests.support.hosts import ON_CPUS, lines_of, require_resumed, run_with_a_loss
from tests.support.programs import run_program
from tests.support.ranks import on_ranks, run_ranks
from tests.support.tape import taped

pytestmark = [
    needs_transformers,
    pytest.mark.skipif(find_spec("accelerate") is None, reason="needs accelerate"),
]

TOTAL = 8
"""Microbatches of a step, of one sample each: 20 samples are steps of 8, 8 and 4, and two epochs 6 steps."""

Result = tuple[list[float], dict[str, Tensor]]


def lane_arguments(folder: Path, world_size: int, **options: Any) -> Any:
    sizes = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": TOTAL // world_size}
    return arguments(folder, **{**sizes, "max_grad_norm": 0.1, **options})


def losses(trainer: Any) -> list[float]:
    return [log["loss"] for log in trainer.state.log_history if "loss" in log]


def trained(
    rank: int, world_size: int, folder: Path, lanes: int | Lanes, family: str, options: dict[str, Any]
) -> Result:
    """Losses of each step, and whole weights after the last one.

    Args:
        options: `TrainingArguments`; besides, "dropout" is the model's, "until" a step to stop at, "resumes"
            whether to go on from a checkpoint, "times" how often to train, "dp_shard" FlatArguments', and
            "replays" whether microbatches of fused layers are replayed.
    """
    import transformers

    class Stop(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop |= state.global_step == until

    options = dict(options)
    dropout = "attn_pdrop" if family == "GPT-2" else "attention_dropout"
    of_model = {dropout: options.pop("dropout")} if "dropout" in options else {}
    resumes, until, times = (options.pop(name, None) for name in ("resumes", "until", "times"))
    of_flat = {"dp_shard": options.pop("dp_shard", None)}
    replays = options.pop("replays", None)
    if replays is not None:
        of_flat |= {"fuse": True, "replay": replays}
    with launched(rank, world_size), nullcontext() if replays is None else taped():
        trainer = flat_trainer(
            FAMILIES[family].build(**of_model),
            lane_arguments(folder, world_size, **options),
            flat=flat_arguments(lanes=lanes, **of_flat),
            callbacks=[Stop()],
        )
        for _ in range(times or 1):
            trainer.train(resume_from_checkpoint=resumes)
        assert not of_flat.get("replay") or trainer._microbatch.replays >= 6
        return losses(trainer), trainer.model.state_dict()


def of_plain_trainer(rank: int, world_size: int, folder: Path) -> Result:
    import transformers

    with launched(rank, world_size):
        args = lane_arguments(
            folder, world_size, optim="sgd", gradient_accumulation_steps=4, max_grad_norm=0.0
        )
        trainer = transformers.Trainer(FAMILIES["Llama"].build(), args, train_dataset=Text())
        trainer.train()
        return losses(trainer), trainer.model.state_dict()


def assert_same(found: list[Result], expected: Result) -> None:
    for figures, weights in found:
        assert figures == expected[0]
        assert [name for name, value in weights.items() if not torch.equal(value, expected[1][name])] == []


def test_any_number_of_ranks_has_the_same_bits(tmp_path: Path) -> None:
    options = {"label_smoothing_factor": 0.1, "dropout": 0.1, "times": 2}
    expected, *_ = run_ranks(1, trained, tmp_path, 4, "GPT-2", options)
    assert len(expected[0]) == 6
    for world_size in (2, 4):
        assert_same(run_ranks(world_size, trained, tmp_path, 4, "GPT-2", options), expected)


def test_with_one_microbatch_a_lane_they_are_those_of_plain_trainer(tmp_path: Path) -> None:
    expected = run_ranks(1, of_plain_trainer, tmp_path)[0]
    for world_size in (1, 4):
        options = {"optim": "sgd", "max_grad_norm": 0.0, "gradient_accumulation_steps": 4 // world_size}
        found = run_ranks(world_size, trained, tmp_path, 4, "Llama", options)
        for figures, weights in found:
            assert figures == pytest.approx(expected[0])
            assert all(torch.equal(value, expected[1][name]) for name, value in weights.items())


def test_a_run_goes_on_with_its_bits_on_another_number_of_ranks(tmp_path: Path) -> None:
    options = {"dropout": 0.1, "gradient_checkpointing": True}
    expected = run_ranks(1, trained, tmp_path / "whole", 4, "Llama", options)[0]
    saving = {**options, "save_strategy": "steps", "save_steps": 2}
    parts = tmp_path / "parts"
    # Two epochs of three steps: stops in the first, and in the second.
    run_ranks(2, trained, parts, 4, "Llama", {**saving, "until": 2})
    run_ranks(4, trained, parts, 4, "Llama", {**saving, "until": 4, "resumes": True})
    assert_same(run_ranks(1, trained, parts, 4, "Llama", {**saving, "resumes": True}), expected)


def test_replayed_microbatches(tmp_path: Path) -> None:
    options = {"num_train_epochs": 4, "train_sampling_strategy": "sequential"}
    expected = run_ranks(1, trained, tmp_path, 4, "Llama", {**options, "replays": False})[0]
    assert_same(run_ranks(4, trained, tmp_path, 4, "Llama", {**options, "replays": True}), expected)


def test_replicas_go_on_without_one_of_them(tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 2, "dp_shard": 2}
    lanes = Lanes(4, block=2)
    expected = run_ranks(4, trained, tmp_path / "whole", lanes, "Llama", saving)[0]
    parts = tmp_path / "parts"
    run_ranks(4, trained, parts, lanes, "Llama", {**saving, "until": 2})
    assert_same(run_ranks(2, trained, parts, lanes, "Llama", {**saving, "resumes": True}), expected)


def test_a_run_that_loses_a_host_goes_on_with_its_bits(tmp_path: Path) -> None:
    module = ("-m", elastic_trainer.__name__)
    whole = run_program(*module, tmp_path / "whole", ranks=1, **ON_CPUS)
    assert whole.returncode == 0, whole.stderr
    *expected, weights = lines_of(whole.stdout)
    assert [step["step"] for step in expected] == list(range(1, elastic_trainer.STEPS + 1))
    (*steps, last), errors = run_with_a_loss((*module, tmp_path / "hosts"), step=10, ranks=1)
    # Accelerate's collectives have no message of their own.
    assert "has ended, or left a collective" in errors or "Connection closed by peer" in errors, errors
    require_resumed([step["step"] for step in steps], elastic_trainer.STEPS, elastic_trainer.SAVE_EVERY)
    assert [step for step in steps if step != expected[step["step"] - 1]] == []
    assert last == weights


@on_ranks(2)
def test_what_depends_on_the_number_of_ranks_raises(rank: int, world_size: int, tmp_path: Path) -> None:
    class Endless(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(Text())

    refused = [
        ({"average_tokens_across_devices": False}, "divided by the items of all ranks"),
        ({"train_sampling_strategy": "group_by_length"}, "order of samples would depend"),
        ({"accelerator_config": {"use_seedable_sampler": False}}, "order of samples would depend"),
        ({"accelerator_config": {"split_batches": True}}, "lanes with accelerator_config.split_batches"),
    ]
    with launched(rank, world_size):
        for options, words in refused:
            args = lane_arguments(tmp_path, world_size, **options)
            for model, flat in ((FAMILIES["Llama"].build(), flat_arguments(lanes=4)), (sharded(), None)):
                assert_raises(ValueError, words, flat_trainer, model, args, flat=flat)
        flat = flat_arguments(lanes=4)
        args = lane_arguments(tmp_path, world_size, gradient_accumulation_steps=3, save_strategy="steps")
        trainer = flat_trainer(FAMILIES["Llama"].build(), args, flat=flat)
        words = "gradient_accumulation_steps=3 on 2 ranks are 6 microbatches a step over 4 lanes"
        assert_raises(ValueError, words, trainer.train)
        args.gradient_accumulation_steps = 4
        trainer.train_dataset = Subset(Text(), range(18))
        assert_raises(ValueError, "2 are left, .* dataloader_drop_last=True leaves them out", trainer.train)
        args.dataloader_drop_last = True
        trainer.train()
        assert trainer.state.global_step == 4
        trainer._get_train_sampler = lambda _: SubsetRandomSampler(range(20))
        assert_raises(ValueError, r"SubsetRandomSampler has no set_epoch\(\)", trainer.train)
        del trainer._get_train_sampler
        trainer.train_dataset = Endless()
        args.max_steps = 1
        assert_raises(ValueError, "a data set with a length", trainer.train)
        trainer.train_dataset = Text()
        args.gradient_accumulation_steps = 2
        words = "8 microbatches of 1 a step, and this one has 4 microbatches of 1"
        assert_raises(ValueError, words, trainer.train, resume_from_checkpoint=True)


def sharded() -> Any:
    model = FAMILIES["Llama"].build()
    return shard(model, policy_of(model), lanes=4)
