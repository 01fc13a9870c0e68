"""transformers' trainers on FlatFSDP: a program for DistributedDataParallel, with one line changed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_type_hints
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import Unpack

from flatfsdp import Options, Precision, shard
from flatfsdp.checkpoint import CheckpointError, Writer
from flatfsdp.compat.transformers import policy_of
from flatfsdp.contract.claimed import is_unit
from flatfsdp.fp8 import DelayedScaling
from tests.support.assertions import assert_raises
from tests.support.checkpoints import names_in
from tests.support.ecosystem.families import (
    FAMILIES,
    Text,
    adapted,
    needs_peft,
    needs_transformers,
)
from tests.support.ecosystem.launched import launched, trainer_options
from tests.support.faults.operations import watched
from tests.support.faults.training import Run
from tests.support.ranks import on_ranks
from tests.support.tape import taped

pytestmark = [
    needs_transformers,
    pytest.mark.skipif(find_spec("accelerate") is None, reason="needs accelerate"),
]


def arguments(folder: Path, kind: str = "TrainingArguments", **options: Any) -> Any:
    import transformers

    return getattr(transformers, kind)(
        output_dir=str(folder), **trainer_options(**{"num_train_epochs": 2, **options})
    )


def flat_trainer(model: Any, args: Any, **options: Any) -> Any:
    from flatfsdp.compat.transformers.trainer import FlatTrainer

    return FlatTrainer(model, args, train_dataset=Text(), **options)


def flat_arguments(**options: Any) -> Any:
    from flatfsdp.compat.transformers.trainer import FlatArguments

    return FlatArguments(**options)


def history(trainer: Any) -> Tensor:
    """Loss, gradient norm and learning rate of each step."""
    keys = ("loss", "grad_norm", "learning_rate")
    return torch.tensor([[log[key] for key in keys] for log in trainer.state.log_history if "loss" in log])


def same(state: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return state.keys() == other.keys() and all(torch.equal(state[key], other[key]) for key in state)


@pytest.mark.parametrize(
    ("family", "options", "flat"),
    [
        ("Llama", {}, {}),
        ("Llama", {"optim": "sgd", "max_grad_norm": 0.0}, {"reshard_after_forward": False}),
        ("GPT-2", {"label_smoothing_factor": 0.1}, {}),
        ("T5", {"average_tokens_across_devices": False}, {"optimize_backward_concat": False}),
    ],
    ids=["ZeRO-3", "ZeRO-2, SGD", "tied weights", "flag off"],
)
@on_ranks(2)
def test_losses_and_gradient_norms_are_those_of_ddp(
    rank: int, world_size: int, tmp_path: Path, family: str, options: dict[str, Any], flat: dict[str, Any]
) -> None:
    import transformers

    with launched(rank, world_size):
        args = arguments(tmp_path, **options)
        ddp = transformers.Trainer(FAMILIES[family].build(), args, train_dataset=Text())
        ddp.train()
        model = FAMILIES[family].build()
        if rank:
            # The first rank's values are used.
            torch.nn.init.normal_(next(model.parameters()))
        ours = flat_trainer(model, args, flat=flat_arguments(**flat))
        ours.train()
        torch.testing.assert_close(history(ours), history(ddp), rtol=1e-5, atol=0)
        # AdamW moves a bias whose gradient is only rounding noise (GPT-2's of keys) differently each time.
        for name, value in ours.model.state_dict().items():
            torch.testing.assert_close(value, ddp.model.state_dict()[name], rtol=1e-4, atol=1e-3)


@on_ranks(4)
def test_replicas_of_shard_groups_that_reduce_in_every_microbatch(
    rank: int, world_size: int, tmp_path: Path
) -> None:
    """A model that was sharded so has the same bits; there are as many reductions as microbatches."""

    def trained(model: Any, flat: Any = None) -> tuple[Tensor, dict[str, Tensor], int]:
        trainer = flat_trainer(model, arguments(tmp_path), flat=flat)
        trainer.train()
        reductions = trainer.model.fsdp_state.shared.ledger.calls["reduce"]
        return history(trainer), trainer.model.state_dict(), reductions

    with launched(rank, world_size):
        plain, sharded, default = (FAMILIES["Llama"].build() for _ in range(3))
        mesh = dist.init_device_mesh("cpu", (2, 2))
        shard(sharded, policy_of(sharded), grad_sync="every", mesh=mesh)
        losses, state, reductions = trained(plain, flat_arguments(grad_sync="every", dp_shard=2))
        assert (plain.fsdp_state.grid.replicate.size, plain.fsdp_state.grid.shard.size) == (2, 2)
        expected, expected_state, _ = trained(sharded)
        assert torch.equal(losses, expected) and same(state, expected_state)
        _, last, fewer = trained(default)
        # Two epochs of two steps, with three microbatches.
        assert reductions * 4 == fewer * 6 and not same(state, last)


@pytest.mark.parametrize("after", [2, 4])
@on_ranks(2)
def test_resumed_training_has_the_bits_of_one_that_was_not_interrupted(
    rank: int, world_size: int, tmp_path: Path, after: int
) -> None:
    """After two of three steps of the first epoch, and after one of the second."""
    import transformers

    class Stop(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = state.global_step == after

    with launched(rank, world_size):
        dropping = {"attention_dropout": 0.1}
        whole = flat_trainer(FAMILIES["Llama"].build(**dropping), arguments(tmp_path / "whole"))
        whole.train()
        options = arguments(tmp_path / "parts", save_strategy="steps", save_steps=after)
        flat_trainer(FAMILIES["Llama"].build(**dropping), options, callbacks=[Stop()]).train()
        resumed = flat_trainer(FAMILIES["Llama"].build(**dropping), options)
        resumed.train(resume_from_checkpoint=True)
        assert torch.equal(history(resumed), history(whole))
        assert same(resumed.model.state_dict(), whole.model.state_dict())
        # From the number of steps Trainer would compute another place in the data.
        options.gradient_accumulation_steps = 4
        wider = flat_trainer(FAMILIES["Llama"].build(), options)
        assert_raises(ValueError, "8 samples a step, .* 16", wider.train, resume_from_checkpoint=True)
        options.gradient_accumulation_steps = 2

        resumed.save_model()
        plain = type(FAMILIES["Llama"].build()).from_pretrained(options.output_dir)
        assert same(plain.state_dict(), whole.model.state_dict())


@contextmanager
def trainer_of(run: Run, folder: Path, **flat: Any) -> Iterator[Any]:
    """A trainer in the middle of a run, at its step."""
    import transformers
    from accelerate.state import AcceleratorState, GradientState

    from flatfsdp.compat.transformers.trainer import FlatTrainer

    args = transformers.TrainingArguments(str(folder), use_cpu=True, report_to="none", save_total_limit=1)
    schedule = torch.optim.lr_scheduler.ConstantLR(run.optimizer, factor=1.0)
    optimizers = run.optimizer, schedule
    trainer = FlatTrainer(run.model, args, optimizers=optimizers, flat=flat_arguments(**flat))
    trainer.state.global_step, trainer.state.epoch = run.step, float(run.step)
    yield trainer
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def killed(folder: Path, after: int, act: Callable[[], object]) -> bool:
    """Acts in a process of its own, and kills it after so many operations on files in the folder.

    Returns:
        Whether there were so many.
    """
    process = os.fork()
    if process == 0:
        done = 0

        def event(_: str) -> None:
            nonlocal done
            done += 1
            if done == after:
                os.kill(os.getpid(), signal.SIGKILL)

        try:
            with watched(folder, event):
                act()
        finally:
            os._exit(0)
    _, status = os.waitpid(process, 0)
    return os.WIFSIGNALED(status)


@pytest.mark.parametrize(("same_step", "async_save"), [(False, False), (True, False), (True, True)])
def test_the_old_or_the_new_is_there_wherever_a_save_is_killed(
    tmp_path: Path, same_step: bool, async_save: bool
) -> None:
    """A save to another folder of the run, and to that of the checkpoint before."""
    old, events, found = tmp_path / "old", [], []
    run = Run()
    run.train()
    with trainer_of(run, old) as trainer:
        trainer._save_checkpoint(None, None)
    digests = [run.digest()]
    run.train()
    digests.append(run.digest())

    def save(folder: Path) -> None:
        with trainer_of(run, folder, async_save=async_save) as trainer:
            trainer.state.global_step = 1 if same_step else 2
            trainer._save_checkpoint(None, None)
            trainer._wait_for_save()

    shutil.copytree(old, tmp_path / "whole")
    with watched(tmp_path / "whole", events.append):
        save(tmp_path / "whole")
    # Of the many writes to one file, only the first; and every second operation of all.
    cuts = [n for n, name in enumerate(events, 1) if n == 1 or name.split()[-1] != events[n - 2].split()[-1]]
    for after in cuts[::2]:
        folder = tmp_path / str(after)
        shutil.copytree(old, folder)
        assert killed(folder, after, lambda folder=folder: save(folder))
        again = Run(seed=1)
        with trainer_of(again, folder) as trainer:
            path = trainer._to_resume_from(True)
            trainer._load_from_checkpoint(path)
            trainer._load_optimizer_and_scheduler(path)
            again.step = int(json.loads(Path(path, "trainer_state.json").read_text())["epoch"])
            assert Path(path, "rng_state.pth").exists()
        found.append(digests.index(again.digest()))
        save(folder)
        left = [name for name in names_in(folder) if not name.startswith("unfinished-")]
        assert left == [f"checkpoint-{1 if same_step else 2}"]
        assert len(list(folder.rglob("*.distcp"))) == 1 + len(
            list(folder.glob("unfinished-*/flatfsdp/*.distcp"))
        )
    # First the old one, then the new one.
    assert found == sorted(found) and set(found) == {0, 1}


@on_ranks(2)
def test_shards_are_saved_while_training_goes_on(rank: int, world_size: int, tmp_path: Path) -> None:
    """A resumed run has the bits of a whole one; a checkpoint without its shards is not whole."""
    import transformers

    from flatfsdp.compat.transformers.trainer.whole import is_whole

    write, may_write = Writer.write_data, threading.Event()

    def late(self: Writer, *args: Any) -> Any:
        may_write.wait(20)
        return write(self, *args)

    class Watch(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 2:
                # The save of the first step waits.
                assert (tmp_path / "checkpoint-1" / "trainer_state.json").exists()
                assert not is_whole(tmp_path / "checkpoint-1")
                may_write.set()
            control.should_training_stop = state.global_step == 3

    with launched(rank, world_size):
        flat = flat_arguments(async_save=True)
        whole = flat_trainer(FAMILIES["Llama"].build(), arguments(tmp_path / "whole"))
        whole.train()
        options = arguments(tmp_path, save_strategy="steps", save_steps=1, save_total_limit=1)
        trainer = flat_trainer(FAMILIES["Llama"].build(), options, flat=flat, callbacks=[Watch()])
        with mock.patch.object(Writer, "write_data", late):
            trainer.train()
        trainer.accelerator.wait_for_everyone()
        assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-3"]
        saved = torch.load(tmp_path / "checkpoint-3" / "training_args.bin", weights_only=False)
        assert saved.save_total_limit == 1
        resumed = flat_trainer(FAMILIES["Llama"].build(), arguments(tmp_path, save_strategy="no"), flat=flat)
        resumed.train(resume_from_checkpoint=True)
        assert torch.equal(history(resumed), history(whole))
        assert same(resumed.model.state_dict(), whole.model.state_dict())


@on_ranks(2)
def test_a_checkpoint_that_a_kill_left_is_skipped(rank: int, world_size: int, tmp_path: Path) -> None:
    with launched(rank, world_size):
        options = arguments(tmp_path, save_strategy="steps", save_steps=2, max_steps=4, save_total_limit=1)
        trainer = flat_trainer(FAMILIES["Llama"].build(), options)
        trainer.train()
        expected = trainer.model.state_dict()
        if rank == 0:
            (tmp_path / "checkpoint-4").rename(tmp_path / "checkpoint-3")
            for name in ("checkpoint-4", "checkpoint-9"):
                (tmp_path / name).mkdir()
            (tmp_path / "checkpoint-9" / "trainer_state.json").write_text('{"cut off": ')
        trainer.accelerator.wait_for_everyone()
        for damaged in ("checkpoint-9", "nothing"):
            resumed = flat_trainer(FAMILIES["Llama"].build(), options)
            with pytest.raises(ValueError, match=f"{damaged} has no complete trainer_state.json"):
                resumed.train(resume_from_checkpoint=str(tmp_path / damaged))
        with pytest.raises(ValueError, match="ranks were given different paths"):
            resumed.train(resume_from_checkpoint=str(tmp_path / str(rank)))
        options.max_steps = 6
        resumed.train(resume_from_checkpoint=True)
        assert resumed.state.global_step == 6 and not same(resumed.model.state_dict(), expected)
        # It is not in the way of others, which it would outlive as the one of the highest number.
        assert names_in(tmp_path) == ["checkpoint-6", "unfinished-checkpoint-4", "unfinished-checkpoint-9"]


@pytest.mark.parametrize("async_save", [False, True])
@on_ranks(2)
def test_of_two_runs_in_one_folder_the_one_that_began_last_goes_on(
    rank: int, world_size: int, tmp_path: Path, async_save: bool
) -> None:
    """Ranks that outlive their launcher would put aside what the run that was started again is saving."""
    with launched(rank, world_size):
        options, flat = arguments(tmp_path, save_strategy="epoch"), flat_arguments(async_save=async_save)
        old, new = (flat_trainer(FAMILIES["Llama"].build(), options, flat=flat) for _ in range(2))
        old.train()
        new.train()
        kept = names_in(tmp_path)
        with pytest.raises(CheckpointError, match="belongs to another run now"):
            old._save_checkpoint(old.model, None)
        assert names_in(tmp_path) == kept
        new._save_checkpoint(new.model, None)


@on_ranks(2)
def test_fp8_with_checkpointing_and_generation_in_the_evaluation(
    rank: int, world_size: int, tmp_path: Path
) -> None:
    from flatfsdp.compat.transformers.trainer import FlatSeq2SeqTrainer

    generated: list[Any] = []

    def metrics(prediction: Any) -> dict[str, float]:
        generated.append(prediction.predictions)
        return {"tokens": float((prediction.predictions >= 0).sum())}

    wide = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "head_dim": 16,
        "pad_token_id": 0,
    }
    with launched(rank, world_size):
        found = []
        for checkpointing in (False, True):
            options = arguments(
                tmp_path / str(checkpointing),
                "Seq2SeqTrainingArguments",
                gradient_checkpointing=checkpointing,
                max_steps=3,
                eval_strategy="steps",
                eval_steps=2,
                save_strategy="steps",
                save_steps=2,
                load_best_model_at_end=True,
                predict_with_generate=True,
                generation_max_length=20,
                bf16=True,
            )
            trainer = FlatSeq2SeqTrainer(
                FAMILIES["Llama"].build(**wide),
                options,
                train_dataset=Text(),
                eval_dataset=Text(),
                compute_metrics=metrics,
                flat=flat_arguments(fuse=True, fp8=DelayedScaling(amax_history_len=4), fp8_weights=True),
            )
            trainer.train()
            found.append(history(trainer))
        assert torch.equal(*found)
        assert len(generated) >= 2 and all(each.shape[1] == 20 for each in generated)


@needs_peft
@on_ranks(2)
def test_lora(rank: int, world_size: int, tmp_path: Path) -> None:
    import peft
    import transformers

    with launched(rank, world_size):
        args = arguments(tmp_path, num_train_epochs=1)
        ddp = transformers.Trainer(adapted(FAMILIES["Llama"].build()), args, train_dataset=Text())
        ddp.train()
        flat = flat_trainer(adapted(FAMILIES["Llama"].build()), args)
        flat.train()
        torch.testing.assert_close(history(flat), history(ddp), rtol=1e-5, atol=0)
        flat.save_model(str(tmp_path / "adapter"))
        loaded = peft.PeftModel.from_pretrained(FAMILIES["Llama"].build(), str(tmp_path / "adapter"))
        assert same(loaded.state_dict(), flat.model.state_dict())


@needs_peft
@on_ranks(2)
def test_what_subclasses_do_to_the_model_comes_before_sharding(
    rank: int, world_size: int, tmp_path: Path
) -> None:
    import peft

    from flatfsdp.compat.transformers.trainer import FlatTrainer

    class Adapting(FlatTrainer):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.model = self.model_wrapped = peft.get_peft_model(
                self.model, peft.LoraConfig(target_modules=["q_proj"])
            )

    class Optimizing(FlatTrainer):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.create_optimizer()

    with launched(rank, world_size):
        args = arguments(tmp_path, max_steps=1)
        for kind, is_adapted in ((Adapting, True), (Optimizing, False)):
            trainer = kind(FAMILIES["Llama"].build(), args, train_dataset=Text())
            assert is_unit(trainer.model)
            trainer.train()
            trained = [name for name, each in trainer.model.named_parameters() if each.requires_grad]
            assert all(("lora_" in name) == is_adapted for name in trained)
            assert sum(group["params"] != [] for group in trainer.optimizer.param_groups) >= 1


@pytest.mark.parametrize("replay", [False, True])
@on_ranks(2)
def test_inputs_are_prepared_once(rank: int, world_size: int, tmp_path: Path, replay: bool) -> None:
    from flatfsdp.compat.transformers.trainer import FlatTrainer

    class Renaming(FlatTrainer):
        """Makes a batch of what the data set has, which can be done once."""

        def _prepare_inputs(self, inputs: Any) -> Any:
            return super()._prepare_inputs({"input_ids": inputs["tokens"], "labels": inputs["tokens"]})

    def tokens(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        return {"tokens": torch.stack([each["input_ids"] for each in samples])}

    with launched(rank, world_size):
        trainer = Renaming(
            FAMILIES["Llama"].build(),
            arguments(tmp_path, max_steps=2, remove_unused_columns=False),
            data_collator=tokens,
            train_dataset=Text(),
            flat=flat_arguments(replay=replay),
        )
        trainer.train()
        assert len(history(trainer)) == 2


def refused() -> list[tuple[dict[str, Any], dict[str, Any], str]]:
    """TrainingArguments, FlatArguments, and the expected words of the error."""
    return [
        ({"fp16": True}, {}, "bf16=True"),
        ({"torch_compile": True}, {}, "compile the layers of trainer.model"),
        ({"optim": "adafactor"}, {}, "optimizer_cls_and_kwargs"),
        ({"bf16_full_eval": True}, {}, "dtype of training"),
        ({"auto_find_batch_size": True}, {}, "per_device_train_batch_size"),
        ({"accelerator_config": {"even_batches": False}}, {}, "as many microbatches"),
        ({"push_to_hub": True}, {"async_save": True}, "push after the training"),
        ({"save_total_limit": 1, "metric_for_best_model": "loss"}, {"async_save": True}, "keep 2"),
        ({"neftune_noise_alpha": 0.1}, {"replay": True}, "hooks would not run"),
    ]


@on_ranks(2)
def test_what_cannot_be_done_is_named_before_anything_changes(
    rank: int, world_size: int, tmp_path: Path
) -> None:
    with launched(rank, world_size):
        model = FAMILIES["Llama"].build()
        for given, flat, words in refused():
            with pytest.raises(ValueError, match=words):
                flat_trainer(model, arguments(tmp_path, **given), flat=flat_arguments(**flat))
        assert not hasattr(model, "fsdp_state")
        with pytest.raises(ValueError, match="pass model, and no model_init"):
            flat_trainer(None, arguments(tmp_path), model_init=FAMILIES["Llama"].build)
        optimizer = torch.optim.AdamW(model.parameters())
        with pytest.raises(ValueError, match="optimizer_cls_and_kwargs"):
            flat_trainer(model, arguments(tmp_path), optimizers=(optimizer, None))
        model = shard(FAMILIES["Llama"].build(), policy_of(FAMILIES["Llama"].build()))
        with pytest.raises(ValueError, match="sharded already, and FlatArguments has fuse, precision"):
            flat_trainer(model, arguments(tmp_path), flat=flat_arguments(fuse=True, precision=Precision()))
        (tmp_path / "optimizer.pt").touch()
        (tmp_path / "trainer_state.json").write_text("{}")
        trainer = flat_trainer(model, arguments(tmp_path, max_steps=1))
        with pytest.raises(ValueError, match="a checkpoint of plain Trainer"):
            trainer.train(resume_from_checkpoint=str(tmp_path))
        trainer.train()
        halved = flat_trainer(FAMILIES["Llama"].build().bfloat16(), arguments(tmp_path)).model
        assert halved.dtype == torch.bfloat16 and next(halved.parameters()).dtype == torch.float32
        assert_raises(NotImplementedError, "a trainer for each trial", trainer.hyperparameter_search)

        with pytest.MonkeyPatch.context() as patch:
            (tmp_path / "current").mkdir(exist_ok=True)
            patch.chdir(tmp_path / "current")
            for url in ("s3://bucket/run", "file:///bucket/run"):
                with pytest.raises(ValueError, match="is a URL"):
                    flat_trainer(FAMILIES["Llama"].build(), arguments(Path(url)))
                assert_raises(ValueError, "is a URL", trainer.train, resume_from_checkpoint=url)
                assert_raises(ValueError, "is a URL", trainer.save_model, url)
            assert list(Path().iterdir()) == []


def test_flat_arguments_need_a_recipe() -> None:
    assert_raises(ValueError, "no recipe", flat_arguments, fp8_weights=True)
    for fp8 in ("delayed", True):
        words = rf"fp8 is {fp8!r}; pass a recipe of flatfsdp\.fp8: Delayed"
        assert_raises(TypeError, words, flat_arguments, fp8=fp8)


@on_ranks(2)
def test_replayed_microbatches(rank: int, world_size: int, tmp_path: Path) -> None:
    with launched(rank, world_size), taped():
        found = []
        for replay in (False, True):
            trainer = flat_trainer(
                FAMILIES["Llama"].build(),
                arguments(tmp_path, num_train_epochs=4, eval_strategy="epoch"),
                eval_dataset=Text(),
                flat=flat_arguments(fuse=True, replay=replay),
            )
            trainer.train()
            found.append(history(trainer))
        assert torch.equal(*found)
        # Steps of two microbatches, and of one at the end of each epoch.
        assert trainer._microbatch.replays >= 6


@on_ranks(2)
def test_logs_have_the_figures_of_all_ranks(rank: int, world_size: int, tmp_path: Path) -> None:
    with launched(rank, world_size):
        options = {"logging_steps": 2, "eval_strategy": "epoch", "save_strategy": "epoch"}
        model = FAMILIES["Llama"].build()
        # The linear maps of each layer, and the head; then attention, of 16 tokens.
        weights = sum(each.weight.numel() for each in model.modules() if isinstance(each, torch.nn.Linear))
        config = model.config
        flops = 6 * weights + 6 * config.num_hidden_layers * config.hidden_size * 16
        trainer = flat_trainer(model, arguments(tmp_path, **options), eval_dataset=Text())
        trainer.train()
        logs = [log for log in trainer.state.log_history if "loss" in log]
        assert len(logs) == 3
        for log in logs:
            assert log["tokens_per_s"] > 0 and 0 < log["data_share"] < 1 and log["peak_gib"] > 0
            ratio = log["tflops_per_rank"] * 1e12 * world_size / log["tokens_per_s"]
            assert ratio == pytest.approx(flops)
        assert not any("tokens_per_s" in log for log in trainer.state.log_history if "loss" not in log)


def test_operations_that_are_not_those_of_all_weights_are_not_counted() -> None:
    from flatfsdp.compat.transformers.trainer.flops import FlopsOfTokens

    model = FAMILIES["Llama"].build()
    whole = FlopsOfTokens.of(model)
    assert whole is not None
    model.lm_head.weight.requires_grad_(False)
    without = FlopsOfTokens.of(model)
    assert without is not None and whole.of_weights - without.of_weights == 2 * model.lm_head.weight.numel()
    model.config.num_local_experts = 4
    assert FlopsOfTokens.of(model) is None
    assert FlopsOfTokens.of(torch.nn.Linear(2, 2)) is None


def test_flat_arguments_take_the_options_of_shard() -> None:
    from flatfsdp.compat.transformers.trainer import FlatArguments

    hints = get_type_hints(FlatArguments.__init__, include_extras=True)
    assert hints["options"] == Unpack[Options]
    assert FlatArguments(timeout=5.0, cpu_offload=True).options == {"timeout": 5.0, "cpu_offload": True}
    with pytest.raises(TypeError, match=r"^FlatArguments\(\) got an unexpected keyword argument 'reshard'"):
        FlatArguments(reshard=True)  # type: ignore[call-arg]
    assert_raises(ValueError, "FlatArguments cannot do device: the Trainer says", FlatArguments, device="cpu")
    with pytest.raises(ValueError, match="replay needs optimize_backward_concat=True"):
        FlatArguments(replay=True, optimize_backward_concat=False)
