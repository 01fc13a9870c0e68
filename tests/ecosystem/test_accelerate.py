"""Programs written for Accelerate with DistributedDataParallel run with `FlatAccelerator`."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

import flatfsdp
import flatfsdp.optim
from flatfsdp import by_class, microbatches
from flatfsdp.checkpoint import CheckpointError
from flatfsdp.contract.claimed import is_unit
from tests.support.against_plain import assert_equal
from tests.support.assertions import assert_raises
from tests.support.ecosystem.families import FAMILIES, needs_transformers
from tests.support.ecosystem.folders import shared_folder
from tests.support.ecosystem.launched import launched
from tests.support.faults.kills import ALL, Kill, Kills
from tests.support.models import VOCAB, Block, Net, build, data, plain_net, update
from tests.support.ranks import on_ranks

pytestmark = pytest.mark.skipif(find_spec("accelerate") is None, reason="needs accelerate")

EPOCHS, STEPS_AN_EPOCH = 2, 2
"""Five microbatches are two steps: one of three, and a last one of two."""


def flat_accelerator(**options: Any) -> Any:
    from flatfsdp.compat.accelerate import FlatAccelerator

    return FlatAccelerator(cpu=True, policy=by_class(Block), **options)


def plain_accelerator(**options: Any) -> Any:
    from accelerate import Accelerator

    return Accelerator(cpu=True, **options)


class Program(NamedTuple):
    """The objects that a training script has after `prepare`."""

    accelerator: Any
    model: Any
    optimizer: Any
    loader: Any
    scheduler: Any


class Curves(NamedTuple):
    """The output of a run, and its final state."""

    losses: list[float]
    norms: list[float]
    rates: list[float]
    state: dict[str, Tensor]


def tokens() -> list[Tensor]:
    """19 sequences: 5 batches for each of 2 ranks, the last of which Accelerate fills up."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, VOCAB, (7,), generator=generator) for _ in range(19)]


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Parameter groups by dimensions of whole parameters, as users make them."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


def begin(
    accelerator: Any,
    *,
    seed: int = 0,
    optimizer: Callable[..., Any] = torch.optim.AdamW,
    shuffle: bool = True,
) -> Program:
    torch.manual_seed(seed)
    model = Net()
    made = optimizer(groups_of(model), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(made, lambda step: 1 / (1 + 0.1 * step))
    loader = DataLoader(tokens(), batch_size=2, shuffle=shuffle, generator=torch.Generator().manual_seed(3))
    return Program(accelerator, *accelerator.prepare(model, made, loader, scheduler))


def train(program: Program, epochs: int = EPOCHS) -> Curves:
    accelerator, model, optimizer, loader, scheduler = program
    losses, norms, rates = [], [], []
    for _ in range(epochs):
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(batch)
                accelerator.backward(loss)
                losses.append(loss.item())
                if accelerator.sync_gradients:
                    norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        rates += scheduler.get_last_lr()
    return Curves(losses, norms, rates, accelerator.get_state_dict(model))


def assert_same(found: Curves, expected: Curves) -> None:
    torch.testing.assert_close(found.losses, expected.losses, rtol=0, atol=2e-6)
    torch.testing.assert_close(found.norms, expected.norms, rtol=1e-5, atol=0)
    assert found.rates == expected.rates
    assert list(found.state) == list(expected.state)
    torch.testing.assert_close(found.state, dict(expected.state), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, flatfsdp.optim.AdamW], ids=["torch", "flatfsdp"])
@on_ranks(2)
def test_a_program_for_ddp(rank: int, world_size: int, optimizer: Callable[..., Any]) -> None:
    """Ranks initialise differently; groups are made by dimensions, before the model is sharded."""
    with launched(rank, world_size):
        expected = train(begin(plain_accelerator(gradient_accumulation_steps=3), seed=rank))
    with launched(rank, world_size):
        program = begin(flat_accelerator(gradient_accumulation_steps=3), seed=rank, optimizer=optimizer)
        found = train(program)
        assert is_unit(program.model)
        assert program.accelerator.unwrap_model(program.model) is program.model
    assert len(found.norms) == EPOCHS * STEPS_AN_EPOCH
    assert_same(found, expected)


@on_ranks(4)
def test_replicas_of_shard_groups_that_reduce_in_every_microbatch(rank: int, world_size: int) -> None:
    """The bits and the reductions of a loop of one's own."""
    own = build(grad_sync="every", mesh=dist.init_device_mesh("cpu", (2, 2)))
    optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
    for batches in data(rank, 2, 3):
        for batch in microbatches(own, batches):
            (own(batch) / 3).backward()
        update(optimizer)
    with launched(rank, world_size):
        options = {"grad_sync": "every", "dp_shard": 2}
        accelerator = flat_accelerator(gradient_accumulation_steps=3, shard_options=options)
        model = plain_net()
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for batch in chain(*data(rank, 2, 3)):
            with accelerator.accumulate(model):
                accelerator.backward(model(batch))
                optimizer.step()
                optimizer.zero_grad()
    assert_equal(model.state_dict(), own.state_dict())
    reductions = [each.fsdp_state.shared.ledger.calls["reduce"] for each in (model, own)]
    assert reductions == [2 * 3 * len(model.fsdp_state.root.units)] * 2
    assert (model.fsdp_state.grid.replicate.size, model.fsdp_state.grid.shard.size) == (2, 2)


def assert_has(accelerator: Any, model: nn.Module, state: dict[str, Tensor]) -> None:
    found = accelerator.get_state_dict(model)
    assert all(map(torch.equal, found.values(), state.values()))


def run_steps(program: Program, skipped: int, stop_after: int | None = None) -> list[float]:
    """Runs one epoch from batch `skipped` on, or up to a batch."""
    accelerator, model, optimizer, loader, scheduler = program
    losses = []
    for batch in accelerator.skip_first_batches(loader, skipped) if skipped else loader:
        with accelerator.accumulate(model):
            loss = model(batch * (torch.rand(batch.shape) < 0.5))
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        if len(losses) == stop_after:
            break
    return losses


@on_ranks(2)
def test_a_run_that_was_interrupted_goes_on_with_the_same_bits(rank: int, world_size: int) -> None:
    from safetensors.torch import load_file

    with shared_folder() as folder:
        with launched(rank, world_size):
            # A thread writes this one while training goes on.
            program = begin(flat_accelerator(gradient_accumulation_steps=2, async_save=True), shuffle=False)
            first = run_steps(program, 0, stop_after=2)
            program.accelerator.save_state(folder / "saved")
            expected = run_steps(program, 2)
            weights = program.accelerator.get_state_dict(program.model)
            program.accelerator.save_state(folder / "later")
            program.accelerator.save_state(folder / "later")
            failing = mock.patch("flatfsdp.compat.accelerate.states.end_save", side_effect=OSError("full"))
            load = program.accelerator.load_state
            # It waits for the save before, whose earlier one is removed by then.
            program.accelerator.save_state(folder / "failed")
            assert len([*folder.glob("later/save-*")]) == 1
            load(folder / "failed")
            with failing:
                program.accelerator.save_state(folder / "failed")
                assert_raises(CheckpointError, "failed in the background: .*full", load, folder / "failed")
            load(folder / "failed")
        with launched(rank, world_size):
            accelerator = flat_accelerator(gradient_accumulation_steps=2)
            program = begin(accelerator, seed=7, shuffle=False)
            accelerator.load_state(str(folder / "saved"))
            assert run_steps(program, 2) == expected
            assert len(first) == 2
            assert_has(accelerator, program.model, weights)
            accelerator.save_model(program.model.head, folder / "part")
            accelerator.wait_for_everyone()
            part = load_file(folder / "part" / "model.safetensors")
            assert torch.equal(part["weight"], weights["head.weight"])
            assert part.keys() == {"weight", "bias"}

            run_steps(program, 0, stop_after=1)
            accelerator.save_state(folder / "between")
            next((folder / "between").glob(f"save-*/random_states_{rank}.pkl")).unlink()
            accelerator.step = 0
            accelerator.load_state(folder / "between")
            assert accelerator.step == 1

            (folder / "later" / "flatfsdp.json").unlink(missing_ok=True)
            assert_raises(ValueError, "stopped before its end", accelerator.load_state, folder / "later")
            assert_raises(ValueError, "different paths", accelerator.save_state, folder / str(rank))
            assert list(folder.glob("[01]")) == []


@on_ranks(2)
def test_a_data_loader_with_a_position_goes_on_there(rank: int, world_size: int) -> None:
    pytest.importorskip("torchdata")
    from accelerate import DataLoaderConfiguration

    options = {
        "dataloader_config": DataLoaderConfiguration(use_seedable_sampler=True, use_stateful_dataloader=True)
    }
    with shared_folder() as folder:
        with launched(rank, world_size):
            program = begin(flat_accelerator(**options))
            batches = iter(program.loader)
            read = [next(batches) for _ in range(2)]
            program.accelerator.save_state(folder)
            rest = [*batches]
            assert (len(read), len(rest)) == (2, 3)
        with launched(rank, world_size):
            program = begin(flat_accelerator(**options))
            program.accelerator.load_state(folder)
            again = [*program.loader]
            assert len(again) == 3 and all(map(torch.equal, again, rest))
            mark = folder / "flatfsdp.json"
            program.accelerator.wait_for_everyone()
            if rank == 0:
                mark.write_text(mark.read_text().replace('"ranks": 2', '"ranks": 3'))
            program.accelerator.wait_for_everyone()
            message = "saved by 3 ranks, and 2 load it, whose data loaders would go on elsewhere"
            assert_raises(ValueError, message, program.accelerator.load_state, folder)


def test_the_old_or_the_new_is_there_whenever_a_save_is_killed() -> None:
    """Kills `save_state` into the folder of the save before, in its parts and around the rename."""
    with Kills() as kills:
        plan = Kill("accelerate", True, ALL, 0)
        events, digests = kills.operations(plan)
        inner = events[0].index("replace old/save-id/flatfsdp-0/.metadata") + 1
        commit = events[0].index("replace old/flatfsdp.json") + 1
        removal = next(n for n, name in enumerate(events[0], 1) if n > commit and name.startswith("unlink"))
        for after in (inner, commit, removal):
            kills.kill(plan._replace(after=after), digests)
        assert (kills.count.old, kills.count.new, kills.count.wrong) == (1, 2, [])


@on_ranks(2)
def test_a_save_that_fails_once_it_is_the_folders_stays(rank: int, world_size: int) -> None:
    """The disk, or another rank, may be lost at that moment."""
    from flatfsdp.compat.accelerate import states

    def lost(folder: Path, mark: states.Mark) -> None:
        end_save(folder, mark)
        raise OSError("the disk is gone")

    end_save = states.end_save
    with shared_folder() as folder, launched(rank, world_size):
        program = begin(flat_accelerator(), shuffle=False)
        program.accelerator.save_state(folder)
        train(program, 1)
        with mock.patch.object(states, "end_save", lost), pytest.raises(Exception, match="the disk is gone"):
            program.accelerator.save_state(folder)
        saved = program.accelerator.get_state_dict(program.model)
        train(program, 1)
        program.accelerator.load_state(folder)
        assert_has(program.accelerator, program.model, saved)


@on_ranks(2)
def test_an_optimizer_that_needs_whole_parameters_is_refused(rank: int, world_size: int) -> None:
    with launched(rank, world_size):
        with pytest.raises(ValueError, match="Adafactor needs whole parameters"):
            begin(flat_accelerator(), optimizer=torch.optim.Adafactor)
        program = begin(flat_accelerator(), optimizer=torch.optim.SGD)
        other = torch.optim.Adafactor([nn.Parameter(torch.ones(2))])
        other.param_groups[0]["params"] = list(program.model.parameters())
        assert_raises(ValueError, "Adafactor needs whole parameters", other.step)


@on_ranks(2)
def test_checkpoints_with_names_of_their_own(rank: int, world_size: int) -> None:
    from accelerate.utils import ProjectConfiguration

    with shared_folder() as folder, launched(rank, world_size):
        configuration = ProjectConfiguration(str(folder), automatic_checkpoint_naming=True, total_limit=2)
        accelerator = flat_accelerator(project_config=configuration)
        program = begin(accelerator, shuffle=False)
        accelerator.register_for_checkpointing(schedule := program.scheduler.scheduler)
        states, epochs = [], []
        for _ in range(2):
            train(program, 1)
            accelerator.save_state()
            states.append(accelerator.get_state_dict(program.model))
            epochs.append(schedule.last_epoch)
        dist.barrier()
        # As a kill leaves it.
        (folder / "checkpoints" / "checkpoint_1" / "flatfsdp.json").unlink(missing_ok=True)
        accelerator.load_state()
        assert_has(accelerator, program.model, states[0])
        assert schedule.last_epoch == epochs[0]

        # The next saves take the place of what was not completed, then of the oldest, and of no whole one.
        for number, left in ((1, [0, 1]), (2, [1, 2])):
            configuration.iteration = number
            accelerator.save_state()
            dist.barrier()
            kept = sorted(path.name for path in (folder / "checkpoints").iterdir())
            assert kept == [f"checkpoint_{each}" for each in left]
            assert all(len(list((folder / "checkpoints" / name).glob("save-*"))) == 1 for name in kept)
            dist.barrier()
        configuration.iteration = 2
        with pytest.raises(ValueError, match="checkpoint_2 holds a checkpoint; set project_configuration"):
            accelerator.save_state()


@needs_transformers
@on_ranks(2)
def test_a_program_for_hugging_face(rank: int, world_size: int) -> None:
    """The layers are found; evaluation, generate and saving are as for DDP."""
    import transformers
    from safetensors.torch import load_file

    from flatfsdp.compat.accelerate import FlatAccelerator

    with shared_folder() as folder, launched(rank, world_size):
        accelerator = FlatAccelerator(cpu=True, mixed_precision="bf16")
        model = FAMILIES["Llama"].build()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        rows = [{"input_ids": (row := torch.arange(index, index + 8)), "labels": row} for index in range(7)]
        model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(rows, batch_size=2))
        assert is_unit(model.model.layers[1])
        assert model.fsdp_state.policy.precision.compute is torch.bfloat16
        losses = []
        for _ in range(3):
            for batch in loader:
                output = model(**batch)
                assert output.logits.dtype is torch.float32
                accelerator.backward(output.loss)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(output.loss.item())
        assert losses[-1] < 0.8 * losses[0]

        model.eval()
        seen = []
        with torch.no_grad():
            for batch in loader:
                assert torch.isfinite(model(**batch).loss)
                seen.append(accelerator.gather_for_metrics(batch["input_ids"]))
        assert torch.equal(torch.cat(seen)[:, 0].sort().values, torch.arange(7))
        unwrapped = accelerator.unwrap_model(model)
        prompt = torch.arange(3 + rank)[None]
        text = unwrapped.generate(prompt, max_new_tokens=3 + rank, do_sample=False, pad_token_id=0)
        assert text.shape[1] <= prompt.shape[1] + 3 + rank

        unwrapped.save_pretrained(
            folder / "whole",
            is_main_process=accelerator.is_main_process,
            save_function=accelerator.save,
            state_dict=accelerator.get_state_dict(model),
        )
        unwrapped.save_pretrained(folder / "streamed", is_main_process=accelerator.is_main_process)
        accelerator.save_model(model, folder / "weights")
        accelerator.wait_for_everyone()
        state = accelerator.get_state_dict(model)
        loaded = [
            transformers.LlamaForCausalLM.from_pretrained(folder / each) for each in ("whole", "streamed")
        ]
        by_hand = FAMILIES["Llama"].build()
        by_hand.load_state_dict(load_file(folder / "weights" / "model.safetensors"))
        for each in (*loaded, by_hand):
            assert all(torch.equal(value, state[name]) for name, value in each.state_dict().items())


@on_ranks(2)
def test_objects_are_prepared_in_any_order(rank: int, world_size: int) -> None:
    """Objects are prepared one by one: two models, a frozen one, and a sharded one with cut parameters."""
    with launched(rank, world_size):
        accelerator = flat_accelerator()
        torch.manual_seed(0)
        first, second, teacher = Net(), Net(), Net().requires_grad_(False)
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (first, second)]
        one = accelerator.prepare(optimizers[0])
        teacher, first = accelerator.prepare(teacher, first)
        second = accelerator.prepare(second)
        other = accelerator.prepare(optimizers[1])
        third = flatfsdp.shard(Net(), by_class(Block))
        groups = flatfsdp.param_groups(
            third, [{"params": lambda _, shape: len(shape) < 2, "weight_decay": 0.0}]
        )
        third, its_own = accelerator.prepare(third, torch.optim.SGD(groups, lr=0.1))
        assert not is_unit(teacher)
        assert third in accelerator._models
        before = [accelerator.get_state_dict(model) for model in (first, second, third)]
        batch = torch.stack(tokens()[:2])
        for model, optimizer in ((first, one), (second, other), (third, its_own)):
            accelerator.backward(model(batch) - teacher(batch))
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        for model, old in zip((first, second, third), before, strict=True):
            new = accelerator.get_state_dict(model)
            assert not any(torch.equal(new[name], value) for name, value in old.items())
        with shared_folder() as folder:
            accelerator.save_state(folder)
            trained = [accelerator.get_state_dict(model) for model in (second, third)]
            second.load_state_dict(before[1])
            third.load_state_dict(before[2])
            accelerator.load_state(folder)
            for model, state in zip((second, third), trained, strict=True):
                assert_has(accelerator, model, state)


@on_ranks(2)
def test_what_cannot_be_right_raises_on_all_ranks(rank: int, world_size: int) -> None:
    from accelerate import DataLoaderConfiguration

    def net() -> Any:
        return Net(blocks=2)

    with launched(rank, world_size):
        accelerator = flat_accelerator(dataloader_config=DataLoaderConfiguration(even_batches=False))
        assert_raises(ValueError, "even_batches=False", accelerator.prepare, DataLoader(tokens()))
        with pytest.raises(NotImplementedError, match="need as many batches"):
            accelerator.join_uneven_inputs([], even_batches=False)
        with pytest.raises(NotImplementedError, match="register_for_checkpointing"):
            accelerator.register_save_state_pre_hook(print)

        model = net()
        stepped = torch.optim.AdamW(model.parameters())
        model(torch.stack(tokens()[:2])).backward()
        stepped.step()
        assert_raises(ValueError, "state of whole parameters", accelerator.prepare, stepped, model)
        assert not is_unit(model)
        with pytest.raises(RuntimeError, match="the model is not the same on all ranks"):
            accelerator.prepare(Net(blocks=2 + rank))

        late = flatfsdp.shard(model := net(), by_class(Block))
        early = torch.optim.SGD(net().parameters(), lr=0.1)
        early.param_groups[0]["params"] = [model.embedding.weight]
        assert_raises(ValueError, "after the optimizer was made", accelerator.prepare, early)
        laned = flatfsdp.shard(Net(), by_class(Block), lanes=2)
        with pytest.raises(ValueError, match=r"the model has lanes, .* flatfsdp\.microbatches"):
            accelerator.prepare(laned)
        with pytest.raises(ValueError, match="modules in this Sequential are sharded"):
            accelerator.prepare(nn.Sequential(nn.Linear(2, 2), late))
        with (
            mock.patch.object(accelerator, "_policy", None),
            pytest.raises(ValueError, match="policy=by_class"),
        ):
            accelerator.prepare(net())
        with pytest.warns(UserWarning, match="BatchNorm"):
            accelerator.prepare(nn.Sequential(Block(), nn.BatchNorm1d(20)))

    with launched(rank, world_size), shared_folder() as folder:
        accelerator = flat_accelerator()
        models = accelerator.prepare(net(), net())
        both = torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.1)
        accelerator.prepare(both)
        assert_raises(ValueError, "an optimizer for each model", accelerator.save_state, folder)
        accelerator.clear(*models)
        model = accelerator.prepare(net())
        parts = [list(model.embedding.parameters()), list(model.blocks.parameters())]
        accelerator.prepare(*(torch.optim.SGD(each, lr=0.1) for each in parts))
        assert_raises(ValueError, "several parameter groups", accelerator.save_state, folder)
        assert list(folder.iterdir()) == []

        accelerator.gradient_accumulation_steps = 2
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.stack(tokens()[:2])))
            with pytest.raises(RuntimeError, match=r"if accelerator\.sync_gradients"):
                accelerator.clip_grad_norm_(model.parameters(), 1.0)

        accelerator.clear()
        alone = flatfsdp.shard(net(), by_class(Block))
        accelerator.prepare(torch.optim.SGD(alone.parameters(), lr=0.1))
        assert_raises(ValueError, r"give accelerator\.prepare the model, too", accelerator.save_state, folder)


@pytest.mark.parametrize("url", ["s3://bucket/run", "gs://bucket/run", "file:///bucket/run"])
@on_ranks(2)
def test_urls_never_become_folders(rank: int, world_size: int, url: str, tmp_path: Path) -> None:
    from accelerate.utils import ProjectConfiguration

    with launched(rank, world_size), pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        named = flat_accelerator(project_config=ProjectConfiguration(url, automatic_checkpoint_naming=True))
        for accelerator in (flat_accelerator(), named):
            # Also without a sharded model.
            for model in (nn.Linear(2, 2).requires_grad_(False), Net(blocks=1)):
                model = accelerator.prepare(model)
                assert_raises(ValueError, "is a URL", accelerator.save_state, url)
                assert_raises(ValueError, "is a URL", accelerator.load_state, url)
                assert_raises(ValueError, "is a URL", accelerator.save_model, model, url)
                assert_raises(ValueError, "is a URL", accelerator.save, {}, url)
        # One rank is enough; the other one hears of it.
        assert_raises(ValueError, "is a URL", accelerator.save_model, model, url if rank else "here")
        assert list(tmp_path.iterdir()) == []


OTHERS = ("fsdp_plugin", "deepspeed_plugin", "parallelism_config")
REFUSED = {**dict.fromkeys(OTHERS, "leave the other engine out"), "dynamo_plugin": "compile the layers"}


@pytest.mark.parametrize("name", REFUSED)
def test_other_engines_are_refused(name: str) -> None:
    assert_raises(ValueError, f"cannot do {name}: .*{REFUSED[name]}", flat_accelerator, **{name: object()})


def test_options_are_refused_before_anything_is_made() -> None:
    from accelerate.state import AcceleratorState
    from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs

    for precision, way_out in (("fp16", "bf16"), ("fp8", "flatfsdp.fp8.autocast")):
        with pytest.raises(ValueError, match=f"mixed_precision='{precision}'.*{way_out}"):
            flat_accelerator(mixed_precision=precision)
    hooked = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.BF16)
    assert_raises(ValueError, r"Precision\(reduce=", flat_accelerator, kwargs_handlers=[hooked])
    assert_raises(ValueError, "dynamo_backend='inductor'", flat_accelerator, dynamo_backend="inductor")
    launcher = {"ACCELERATE_USE_FSDP": "true"}, {"ACCELERATE_MIXED_PRECISION": "fp16"}
    for variables in launcher:
        with mock.patch.dict("os.environ", variables), pytest.raises(ValueError, match="cannot do"):
            flat_accelerator()
    assert_raises(TypeError, "reshard_after", flat_accelerator, shard_options={"reshard_after": True})
    assert_raises(ValueError, "device", flat_accelerator, shard_options={"device": "cpu"})
    assert_raises(ValueError, r"'lanes'\]: .* see FlatTrainer", flat_accelerator, shard_options={"lanes": 2})
    assert AcceleratorState._shared_state == {}
