"""Lightning's Trainer and Fabric: programs written for DDP, with one line changed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from flatfsdp import by_class, checkpoint, microbatches, register_forward_method, shard
from flatfsdp.optim import AdamW
from tests.support.ranks import on_ranks

L = pytest.importorskip("lightning", reason="needs Lightning")

from lightning.pytorch.callbacks import (  # noqa: E402
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.plugins.io import AsyncCheckpointIO  # noqa: E402

import flatfsdp.compat.lightning as fabric  # noqa: E402
from flatfsdp.compat.lightning.trainer import FlatFSDPStrategy, MetricsCallback  # noqa: E402
from tests.support.assertions import assert_raises  # noqa: E402
from tests.support.lanes import differing  # noqa: E402

WIDTH, COUNT = 8, 24


class Program(L.LightningModule):
    """A module written for DDP."""

    def __init__(self, rate: float = 0.05, manual: bool = False) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = not manual
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return x * self.scale

    def loss(self, x: Tensor) -> Tensor:
        return (self(x) - x.roll(1, 1)).square().mean() + 1e-2 * self.scale.square().sum()

    def training_step(self, batch: Tensor, index: int) -> Tensor | None:
        loss = self.loss(batch)
        self.log("loss", loss)
        self.seen.append(loss.detach())
        if self.automatic_optimization:
            return loss
        self.manual_backward(loss)
        if index % 2:
            optimizer = self.optimizers()
            self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()
        return None

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        norms = [p.grad.norm() for p in self.parameters()]
        self.seen.append(torch.stack([torch.as_tensor(norm) for norm in norms]).norm())

    def validation_step(self, batch: Tensor, index: int) -> None:
        loss = self.loss(batch)
        self.log("validation", loss, sync_dist=True)
        self.seen.append(loss)

    test_step = validation_step

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.rate)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


def data(seed: int = 0) -> DataLoader[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return DataLoader(list(torch.randn(COUNT, WIDTH, generator=generator)), batch_size=2)


def trainer(rank: int, world_size: int, folder: Path, strategy: Any, **options: Any) -> Any:
    """A Trainer on a rank that already exists."""
    os.environ["LOCAL_RANK"] = str(rank)
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    return L.Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy=strategy,
        default_root_dir=folder,
        **{"max_epochs": 2, "enable_checkpointing": False, **quiet, **options},
    )


STRATEGIES: dict[str, Callable[[], Any]] = {
    "ddp": lambda: "ddp",
    "one unit": FlatFSDPStrategy,
    "units": lambda: FlatFSDPStrategy(by_class(nn.Sequential)),
}


@pytest.mark.parametrize(
    "options",
    [
        {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
        {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value", "precision": "bf16-mixed"},
        {"manual": True},
    ],
    ids=["accumulate", "mixed", "manual"],
)
@on_ranks(2)
def test_a_program_for_ddp_has_its_losses_and_norms(
    rank: int, world_size: int, tmp_path: Path, options: dict[str, Any]
) -> None:
    options = dict(options)
    manual, found = options.pop("manual", False), {}
    for name, strategy in STRATEGIES.items():
        torch.manual_seed(rank)  # The first rank's values count.
        module = Program(manual=manual)
        run = trainer(rank, world_size, tmp_path, strategy(), **options)
        run.fit(module, data(), data(1))
        run.test(module, data(2), verbose=False)
        found[name] = module.seen
        assert module.device.type == "cpu"
    assert len(found["ddp"]) > 30
    rounding = 1e-2 if "precision" in options else 1e-5
    for each in ("one unit", "units"):
        torch.testing.assert_close(found[each], found["ddp"], rtol=rounding, atol=1e-6)


@on_ranks(4)
def test_replicas_of_shard_groups_that_reduce_in_every_microbatch(
    rank: int, world_size: int, tmp_path: Path
) -> None:
    """The bits and the reductions of a loop of one's own."""
    torch.manual_seed(0)
    mesh = dist.init_device_mesh("cpu", (2, 2))
    own: Any = shard(Program(), by_class(nn.Sequential), grad_sync="every", mesh=mesh)
    register_forward_method(own, "loss")
    (optimizer,), _ = own.configure_optimizers()
    rows = list(data(rank).dataset)[: COUNT // 2]
    batches = torch.stack(rows).split(2)
    for step in range(3):
        for batch in microbatches(own, batches[2 * step : 2 * step + 2]):
            (own.loss(batch) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.manual_seed(0)
    module: Any = Program()
    strategy = FlatFSDPStrategy(by_class(nn.Sequential), grad_sync="every", dp_shard=2)
    own_data = {"max_epochs": 1, "accumulate_grad_batches": 2, "use_distributed_sampler": False}
    trainer(rank, world_size, tmp_path, strategy, **own_data).fit(module, DataLoader(rows, batch_size=2))
    assert differing(module.state_dict(), own.state_dict()) == []
    reductions = [each.fsdp_state.shared.ledger.calls["reduce"] for each in (module, own)]
    assert reductions == [len(batches) * len(own.fsdp_state.root.units)] * 2
    assert (module.fsdp_state.grid.replicate.size, module.fsdp_state.grid.shard.size) == (2, 2)


class SlowRows(Dataset[Tensor]):
    """Random rows, for each of which a rank waits."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(self._seconds)
        return torch.randn(WIDTH, generator=torch.Generator().manual_seed(index))


class Fused(Program):
    def configure_optimizers(self) -> Any:
        return AdamW(self.parameters(), lr=1e-2)


@pytest.mark.parametrize(
    ("program", "clip", "has_norm"), [(Program, None, False), (Fused, None, True), (Fused, 0.1, False)]
)
@on_ranks(2)
def test_the_callback_logs_figures_of_all_ranks(
    rank: int, world_size: int, tmp_path: Path, program: type[Program], clip: float | None, has_norm: bool
) -> None:
    found: list[dict[str, float]] = []
    norms: list[float] = []

    class Notes(L.Callback):
        def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
            norms.append(float(torch.stack([p.grad.norm() for p in module.parameters()]).norm()))

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            figures = {key: float(value) for key, value in trainer.callback_metrics.items()}
            if "tokens_per_s" in figures and figures not in found:
                found.append(figures)

    options = {
        "accumulate_grad_batches": 2,
        "log_every_n_steps": 2,
        "max_epochs": 2,
        "gradient_clip_val": clip,
        "limit_val_batches": 1,
    }
    callbacks = [MetricsCallback(torch.numel, flops_per_token=1e6), Notes()]
    run = trainer(rank, world_size, tmp_path, FlatFSDPStrategy(), callbacks=callbacks, **options)
    profiler = run.profiler
    run.fit(program(), DataLoader(SlowRows(0.005), 2), DataLoader(SlowRows(0.25), 2))
    assert run.profiler is profiler
    # Six batches of a rank are three steps, and there are two epochs.
    assert len(found) >= 2
    # Two steps have four batches of two rows; between the second step and the fourth is a validation.
    assert all(4 * 2 * 0.005 <= figures["data_s"] < 2 * 0.25 for figures in found[:2])
    # What the optimizer finds after the Trainer's clipping is no norm of the step.
    assert ("grad_norm" in found[0]) is has_norm
    if has_norm:
        assert found[0]["grad_norm"] == pytest.approx(norms[1], rel=1e-4)
    for figures in found:
        expected = figures["tokens_per_s"] * 1e6 / 1e12 / world_size
        assert figures["tflops_per_rank"] == pytest.approx(expected, rel=1e-4)


@on_ranks(2)
def test_ranks_predict_another_number_of_batches(rank: int, world_size: int, tmp_path: Path) -> None:
    """Lightning does not pad predictions: of 25 rows the first rank has 7 batches, the other one 6."""
    inputs = torch.randn(25, WIDTH, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    module = Program()
    expected = module(inputs).detach()
    rows = DataLoader(list(inputs), batch_size=2)
    found = trainer(rank, world_size, tmp_path, STRATEGIES["units"]()).predict(module, rows)
    assert len(found) == 7 - rank
    torch.testing.assert_close(torch.cat(found), expected[rank::2])


@on_ranks(2)
def test_a_run_that_was_interrupted_goes_on_with_the_same_bits(
    rank: int, world_size: int, tmp_path: Path
) -> None:
    """It resumes from what the checkpoint callback wrote; the folder is one of `flatfsdp.checkpoint`, too.

    A thread writes the checkpoints that it resumes from.
    """
    units = STRATEGIES["units"]

    def run(*, epochs: int, folder: Path, resumed: str | None = None) -> tuple[Program, Any]:
        torch.manual_seed(rank if resumed is None else 7)
        saving = ModelCheckpoint(folder, monitor="validation", save_top_k=1, save_last=True)
        options = {"enable_checkpointing": True, "callbacks": [saving], "accumulate_grad_batches": 2}
        strategy = FlatFSDPStrategy(by_class(nn.Sequential), async_save=folder.name == "first")
        fitted = trainer(rank, world_size, folder, strategy, max_epochs=epochs, **options)
        module = Program()
        fitted.fit(module, data(), data(1), ckpt_path=resumed)
        # The callback's best one and the last one, both whole.
        dist.barrier()
        assert len([*folder.glob("*.ckpt")]) == len([*folder.glob("*.ckpt/.metadata")]) == 2
        return module, fitted

    through, _ = run(epochs=4, folder=tmp_path / "through")
    first, fitted = run(epochs=2, folder=tmp_path / "first")
    last = fitted.checkpoint_callback.last_model_path
    second, fitted = run(epochs=4, folder=tmp_path / "second", resumed=last)
    values = through.state_dict()
    assert all(torch.equal(value, values[name]) for name, value in second.state_dict().items())
    assert len(second.seen) > 30
    assert all(map(torch.equal, second.seen[-30:], through.seen[-30:]))

    alone = shard(Program(), by_class(nn.Sequential))
    extra = checkpoint.load(last, alone)
    assert extra["epoch"] == 1 and extra["hyper_parameters"]["rate"] == 0.05
    values = first.state_dict()
    assert all(torch.equal(value, values[name]) for name, value in alone.state_dict().items())
    evaluated, last = Program(), fitted.checkpoint_callback.last_model_path
    trainer(rank, world_size, tmp_path, units()).validate(evaluated, data(1), ckpt_path=last, verbose=False)
    values = through.state_dict()
    assert all(torch.equal(value, values[name]) for name, value in evaluated.state_dict().items())


class Edited(Program):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"] = {"first.weight": torch.zeros(1)}


class Two(Program):
    def configure_optimizers(self) -> Any:
        parameters = list(self.parameters())
        return [torch.optim.SGD(parameters[:2], 0.1), torch.optim.SGD(parameters[2:], 0.1)]


class Early(Program):
    def __init__(self) -> None:
        super().__init__()
        self.optimizer = torch.optim.SGD(self.parameters(), 0.1)

    def configure_optimizers(self) -> Any:
        return self.optimizer


class Inside(Program):
    def configure_model(self) -> None:
        shard(self.blocks[0])


@pytest.mark.parametrize("url", ["memory://bucket/run", "file:///bucket/run"])
@on_ranks(2)
def test_urls_never_become_folders(rank: int, world_size: int, tmp_path: Path, url: str) -> None:
    """`fit` raises before it trains, and not in its first save."""

    def begin(**options: Any) -> Any:
        return trainer(rank, world_size, tmp_path, STRATEGIES["units"](), **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        module, saver = Program(), ModelCheckpoint(url)
        with pytest.raises(ValueError, match="is a URL"):
            begin(max_epochs=1, enable_checkpointing=True, callbacks=[saver]).fit(module, data())
        assert module.seen == []
        program = Program()
        fitted = begin(max_epochs=1)
        fitted.fit(program, data())
        assert_raises(ValueError, "is a URL", fitted.save_checkpoint, url)
        assert_raises(ValueError, "is a URL", begin().validate, Program(), data(1), ckpt_path=url)
        assert not any(path.name.endswith(":") for path in tmp_path.rglob("*"))


@on_ranks(2)
def test_what_cannot_be_right_is_named(rank: int, world_size: int, tmp_path: Path) -> None:
    def fit(module: Program, strategy: Any = None, **options: Any) -> Any:
        run = trainer(rank, world_size, tmp_path, strategy or FlatFSDPStrategy(), max_epochs=1, **options)
        run.fit(module, data())
        return run

    for module, error, message in (
        (Two(manual=True), NotImplementedError, "2 optimizers, .* several parameter groups"),
        (Early(), ValueError, r"has parameter .*make it after the model is sharded"),
        (Inside(), ValueError, r"blocks\.0\. is sharded already.*leave it to the strategy"),
    ):
        assert_raises(error, message, fit, module)
    for callback in (WeightAveraging(), StochasticWeightAveraging(0.1)):
        with pytest.raises(
            NotImplementedError, match=r"averages a copy .* keep an EMA of flatfsdp\.checkpoint\.ema"
        ):
            fit(Program(), callbacks=[callback])
    for precision, plugin in (("bf16-true", "HalfPrecision"), ("64-true", "DoublePrecision")):
        with pytest.raises(ValueError, match=f"{plugin} with precision='{precision}'.*Precision"):
            fit(Program(), precision=precision)
    message = r"not by AsyncCheckpointIO; leave it out: .*async_save=True"
    with pytest.raises(ValueError, match=message):
        fit(Program(), plugins=[AsyncCheckpointIO()])
    of_fabric = fabric.FlatFSDPStrategy(checkpoint_io=AsyncCheckpointIO())
    assert_raises(ValueError, "leave it out: checkpoint.CheckpointManager", of_fabric.setup_environment)
    with pytest.raises(TypeError, match="unexpected keyword argument 'find_unused_parameters'"):
        FlatFSDPStrategy(find_unused_parameters=True)
    assert_raises(TypeError, "no option device; the Trainer has", FlatFSDPStrategy, device="cpu")
    with pytest.raises(ValueError, match=r"the Trainer's is in flatfsdp\.compat\.lightning\.trainer"):
        L.Trainer(strategy=fabric.FlatFSDPStrategy(), accelerator="cpu", devices=1)
    with pytest.raises(ValueError, match=r"Fabric's is in flatfsdp\.compat\.lightning\)"):
        fabric.Fabric(strategy=FlatFSDPStrategy(), accelerator="cpu", devices=1)  # type: ignore[arg-type]

    saved = fit(Edited())
    with pytest.raises(NotImplementedError, match=r"has changed state_dict .* under another key"):
        saved.save_checkpoint(tmp_path / "edited")
    run = fit(Program(), "ddp")
    run.save_checkpoint(tmp_path / "ddp.ckpt")
    plain = torch.load(tmp_path / "ddp.ckpt")["state_dict"]
    module = Program()
    with pytest.raises(ValueError, match="is a file that another strategy has written"):
        trainer(rank, world_size, tmp_path, FlatFSDPStrategy()).fit(
            module, data(), ckpt_path=tmp_path / "ddp.ckpt"
        )
    evaluated = trainer(rank, world_size, tmp_path, FlatFSDPStrategy())
    evaluated.test(module, data(), ckpt_path=tmp_path / "ddp.ckpt", verbose=False)
    assert all(torch.equal(value, plain[name]) for name, value in module.state_dict().items())
