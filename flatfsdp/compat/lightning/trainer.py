"""The Trainer's interface: `from flatfsdp.compat.lightning.trainer import FlatFSDPStrategy`.

In:   a LightningModule written for DDP.
Out:  the same object, sharded in place; the Trainer's loop calls it as before.
Next: `training_loops.py` shards, `flatfsdp.checkpoint` saves and loads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import Unpack

from flatfsdp.checkpoint import Writer
from flatfsdp.checkpoint.background import BackgroundSave
from flatfsdp.checkpoint.ema import EMA
from flatfsdp.checkpoint.loading import load_opened
from flatfsdp.checkpoint.saving import sharded_training_state, write
from flatfsdp.comm.paths import local_path
from flatfsdp.compat.lightning.in_lanes import StepsInLanes
from flatfsdp.compat.training_loops import (
    open_folder,
    require_current,
    require_no_checkpoint_io,
    require_place,
    shard_as_ddp,
)
from flatfsdp.contract.claimed import is_unit
from flatfsdp.engine.api.classes import FlatFSDPModule
from flatfsdp.engine.api.shard import register_forward_method
from flatfsdp.engine.api.wrap import WrapPolicy
from flatfsdp.engine.whole.units import units_in
from flatfsdp.options import Options, require_known
from flatfsdp.profiling.metrics import GemmName, Metrics

try:
    from lightning import pytorch
except ModuleNotFoundError:
    try:
        import pytorch_lightning as pytorch
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"flatfsdp.compat.lightning.trainer needs Lightning's Trainer ({error}): pip install lightning"
        ) from error

__all__ = ["FlatFSDPStrategy", "MetricsCallback"]

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")
"""Methods of a LightningModule that the Trainer calls instead of its forward."""

_AVERAGING = {"WeightAveraging", "StochasticWeightAveraging"}
"""Lightning's callbacks for averaging weights; versions have one or both."""


class FlatFSDPStrategy(pytorch.strategies.DDPStrategy):
    """Trainer strategy with FlatFSDP as its engine: one process per device.

        trainer = Trainer(devices=2, strategy=FlatFSDPStrategy(by_class(Block)))
        trainer.fit(Module(), loader)

    A LightningModule written for DDP runs unchanged, with DDP's losses and gradient norms: gradient clipping,
    accumulation, validation, callbacks, schedulers and manual optimization work.  It is sharded in place,
    from the first rank's values, when `fit`, `validate`, `test` or `predict` begins, and stays sharded.
    `configure_optimizers` is called afterwards.

    A checkpoint is a folder, each rank's part in its own file, that `flatfsdp.checkpoint.load` reads as well,
    on any number of ranks; objects other than model and optimizer become its `extra`.

    Args:
        policy: which modules become units.  None: the module is one unit, whole on each device while it
            computes; its gradients and optimizer state are still sharded.
        overwrite: whether a checkpoint replaces another one in its folder; the old one stays loadable until
            the new one is complete.
        async_save: whether a thread writes checkpoints while training goes on, from a copy in host memory.
            The next save, a load and the end of `fit` wait for it, and raise its error on every rank;
            checkpoints that a callback removes are removed then.  It takes the place of AsyncCheckpointIO.
        process_group_backend: backend, as for Lightning's DDPStrategy.
        process_group_timeout: timeout of the process group, which DDPStrategy calls timeout.
        start_method: how processes are started, as for Lightning's DDPStrategy.
        options: `Options` of `shard`, such as `precision`, but no `device`, which is the Trainer's.

    Attributes:
        ema: an average of the module's weights, saved in checkpoints and restored by `fit`; set it in a
            callback's `on_fit_start`.

    Raises:
        TypeError: for other options.
    """

    def __init__(
        self,
        policy: WrapPolicy | None = None,
        *,
        overwrite: bool = True,
        async_save: bool = False,
        process_group_backend: str | None = None,
        process_group_timeout: timedelta = timedelta(minutes=30),
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        **options: Unpack[Options],
    ) -> None:
        super().__init__(
            process_group_backend=process_group_backend,
            timeout=process_group_timeout,
            start_method=start_method,
        )
        require_known("FlatFSDPStrategy", options)
        if "device" in options:
            raise TypeError("FlatFSDPStrategy has no option device; the Trainer has accelerator=, devices=")
        self._policy, self._overwrite, self._options = policy, overwrite, options
        self.ema: EMA | None = None
        self._gathered = ExitStack()
        self._lanes: StepsInLanes | None = None
        self._background = BackgroundSave() if async_save else None
        # What is to be removed once the save in flight has ended.
        self._superseded: list[str | Path] = []

    def __repr__(self) -> str:
        """The place of each strategy: Fabric shows this when it refuses the Trainer's as invalid."""
        return "the Trainer's FlatFSDPStrategy (Fabric's is in flatfsdp.compat.lightning)"

    # ---- setup ------------------------------------------------------------------------------------------

    def setup_environment(self) -> None:
        """Checks the Trainer's precision, and sets up the processes.

        Raises:
            ValueError: if the Trainer casts in a way that is not known to give DDP's numbers.
        """
        plugin = self.precision_plugin
        is_plain = type(plugin) is pytorch.plugins.Precision
        if not is_plain and not (
            type(plugin) is pytorch.plugins.MixedPrecision and plugin.precision == "bf16-mixed"
        ):
            raise ValueError(
                f"the Trainer has {type(plugin).__name__} with precision={plugin.precision!r}; take "
                "'bf16-mixed', or leave it out: FlatFSDPStrategy(precision=flatfsdp.Precision(compute=...))"
            )
        super().setup_environment()

    def setup(self, trainer: pytorch.Trainer) -> None:
        """Shards the module, unless it is sharded already, and makes the optimizer.

        Raises:
            ValueError: if only a part of it is sharded, or the module is on another device or over other
                ranks; if checkpoints are to be saved to a URL, or by a CheckpointIO; in `fit`, for lanes
                with manual optimization.
            TypeError: if it cannot be sharded in place.
            NotImplementedError: with a callback that averages weights in its own copy of the module.
        """
        require_no_checkpoint_io(self._checkpoint_io, "FlatFSDPStrategy(async_save=True) writes in a thread")
        for callback in trainer.callbacks:
            if any(kind.__name__ in _AVERAGING for kind in type(callback).__mro__):
                raise NotImplementedError(
                    f"{type(callback).__name__} averages a copy of the whole module, which is sharded; in a "
                    "callback of your own keep an EMA of flatfsdp.checkpoint.ema"
                )
        for callback in trainer.checkpoint_callbacks if trainer.state.fn == "fit" else ():
            # Now, rather than in the first save.
            local_path(getattr(callback, "dirpath", None) or "")
        assert self.accelerator is not None and self.lightning_module is not None
        self.accelerator.setup(trainer)
        if not is_unit(self.lightning_module):
            self._shard(self.lightning_module)
        self.model = module = self._module
        way_out = "leave it to the strategy: FlatFSDPStrategy(policy, precision=...)"
        require_place(module, self.root_device, self.world_size, "Lightning", way_out)
        if trainer.state.fn == "fit":
            has_lanes = module.fsdp_state.policy.lanes is not None
            self._lanes = StepsInLanes(module, trainer) if has_lanes else None
            self.setup_optimizers(trainer)
            if self._lanes is not None:
                self._lanes.require_schedulers()
        self.setup_precision_plugin()

    def _shard(self, module: pytorch.LightningModule) -> None:
        for name, _ in units_in(module):
            way_out = "leave it to the strategy: FlatFSDPStrategy(policy, ...)"
            raise ValueError(f"{name} is sharded already, not the whole {type(module).__name__}; {way_out}")
        if self._layer_sync is not None:
            module = self._layer_sync.apply(module)
        if not any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
            module.to(self.root_device)
        shard_as_ddp(module, self._policy, self.root_device, self._options)
        for name in _STEPS:
            register_forward_method(module, name)

    def setup_optimizers(self, trainer: pytorch.Trainer) -> None:
        """Makes the optimizer of the sharded module.

        Raises:
            NotImplementedError: if there are several; a checkpoint holds the state of one.
            ValueError: if it was made before the module was sharded.
        """
        self._reset_optimizers_and_schedulers()
        super().setup_optimizers(trainer)
        if len(self.optimizers) > 1:
            found = f"{len(self.optimizers)} optimizers, and a checkpoint holds one"
            raise NotImplementedError(f"configure_optimizers made {found}; take several parameter groups")
        for optimizer in self.optimizers:
            require_current(optimizer, "make it after the model is sharded, in configure_optimizers")

    @property
    def _module(self) -> FlatFSDPModule:
        module = self.lightning_module
        assert isinstance(module, FlatFSDPModule)
        return module

    # ---- predictions ------------------------------------------------------------------------------------

    def on_predict_start(self) -> None:
        """Gathers the whole module until the end, as some ranks may have one batch more than others."""
        super().on_predict_start()
        self._gathered.enter_context(self._module.unsharded())

    def on_predict_end(self) -> None:
        """Frees what `on_predict_start` has gathered."""
        self._gathered.close()
        super().on_predict_end()

    def on_exception(self, exception: BaseException) -> None:
        """Frees what `on_predict_start` has gathered, and ends a step that was interrupted."""
        self._gathered.close()
        if self._lanes is not None:
            self._lanes.close()
        super().on_exception(exception)

    # ---- training ---------------------------------------------------------------------------------------

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Context in which gradients are accumulated and not reduced."""
        # With lanes the engine knows the place of each microbatch.
        with self._module.no_sync() if self._lanes is None else nullcontext():
            yield

    def process_dataloader(self, dataloader: object) -> object:
        """The Trainer's loader; with lanes, one of training data loads this rank's microbatches in order.

        Raises:
            ValueError: with lanes, if the data have no order that all ranks know, or lanes cannot have
                equally many microbatches.
        """
        # Lightning does not say whose loader it is, but which loop asks for it.
        is_training = self.lightning_module.trainer.training
        return dataloader if self._lanes is None or not is_training else self._lanes.dealt(dataloader)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's `training_step`; with lanes, as a microbatch among those of all ranks."""
        if self._lanes is None:
            return super().training_step(*args, **kwargs)
        with self._lanes.microbatch():
            output = super().training_step(*args, **kwargs)
        self._lanes.keep_loss(output)
        return output

    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Runs the backward; with lanes, whose gradients are added over ranks, of a share of the loss."""
        if self._lanes is None:
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        found = super().backward(self._lanes.share(), optimizer, *args, **kwargs)
        self._lanes.end_microbatch()
        return found

    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Runs the last microbatch of a step, and the optimizer.

        Raises:
            RuntimeError: with lanes, if a microbatch of the step had no backward.
        """
        closure = closure if self._lanes is None else self._lanes.whole(closure)
        return super().optimizer_step(optimizer, closure, *args, **kwargs)

    # ---- checkpoints ------------------------------------------------------------------------------------

    # The module is sharded before a checkpoint is loaded, and `load_checkpoint` loads the optimizer, too.
    restore_checkpoint_after_setup = True
    lightning_restore_optimizer = False

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """A placeholder for the model, whose shards `save_checkpoint` writes."""
        return _Elsewhere()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """A placeholder for the optimizer's state, which `save_checkpoint` writes as well."""
        return _Elsewhere()

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """Writes a folder, each rank its part, with `flatfsdp.checkpoint.save`.

        Raises:
            NotImplementedError: with storage_options; if a hook or callback has replaced a state dict in
                `checkpoint`, by averaged weights for example.
            CheckpointError: with `async_save`, if the save before has failed; nothing is saved then.
            Exception: what `flatfsdp.checkpoint.save` raises, on every rank.
        """
        if storage_options is not None:
            raise NotImplementedError("FlatFSDPStrategy saves to a folder, without storage_options")
        states = [checkpoint.get("state_dict"), *checkpoint.get("optimizer_states", [])]
        if not all(type(state) is _Elsewhere and not state for state in states):
            raise NotImplementedError(
                "a hook or callback has changed state_dict or optimizer_states of the checkpoint, which are "
                "written from the shards; put what else is to be saved under another key"
            )
        optimizer = self.optimizers[0] if len(states) > 1 else None
        extra = {k: v for k, v in checkpoint.items() if k not in ("state_dict", "optimizer_states")}
        if self._lanes is not None:
            self._lanes.note_ranks(extra)
        path = local_path(self.broadcast(filepath))
        # Hyperparameters of a module may be of any class, and a run should not end for them.
        self._wait_for_save()
        writer = Writer(path, overwrite=self._overwrite, extra=extra, weights_only=False)
        if self._background is None:
            write(writer, self._module, optimizer, self.ema)
            return
        state = sharded_training_state(self._module, optimizer, self.ema)
        self._background.start(str(path), writer, state, self._module, lambda: None)

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Removes a checkpoint; with `async_save` not before the next one is whole."""
        if self._background is None:
            super().remove_checkpoint(filepath)
        else:
            self._superseded.append(filepath)

    def on_train_end(self) -> None:
        """Waits for the save in flight, and ends a step that was stopped within."""
        super().on_train_end()
        if self._lanes is not None:
            self._lanes.close()
        self._wait_for_save()

    def _wait_for_save(self) -> None:
        if self._background is None:
            return
        superseded, self._superseded = self._superseded, []
        # They stay if the save has failed.
        self._background.wait()
        for path in superseded:
            super().remove_checkpoint(path)

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Loads a folder, on any number of ranks; in `fit`, the optimizer as well.

        For `validate`, `test` and `predict` it may be a file written by another strategy.

        Args:
            checkpoint_path: the folder or file.
            weights_only: passed to `torch.load` for objects other than model and optimizer; None means True.

        Raises:
            ValueError: for a file, in `fit`; if model or optimizer is not what was saved.
            Exception: what `flatfsdp.checkpoint.load` raises, on every rank, before anything has changed.
        """
        self._wait_for_save()
        path, module = local_path(self.broadcast(checkpoint_path)), self._module
        if path.is_file():
            return self._load_file(path, weights_only)
        opened, extra = open_folder(path, module, weights_only)
        optimizer = self.optimizers[0] if self._is_fitting and self.optimizers else None
        if self._lanes is not None and self._is_fitting:
            self._lanes.count_on_these_ranks(extra)
        load_opened(opened, module, optimizer, ema=self.ema if self._is_fitting else None)
        return extra

    def _load_file(self, path: Path, weights_only: bool | None) -> dict[str, Any]:
        if self._is_fitting:
            raise ValueError(
                f"{path} is a file that another strategy has written; begin from its weights, without "
                'ckpt_path: module.load_state_dict(torch.load(path)["state_dict"]) before fit'
            )
        saved: dict[str, Any] = torch.load(path, map_location="cpu", mmap=True, weights_only=weights_only)
        self._module.load_state_dict(saved["state_dict"], strict=self.lightning_module.strict_loading)
        return saved

    @property
    def _is_fitting(self) -> bool:
        return self.lightning_module.trainer.state.fn == "fit"

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Does nothing: `load_checkpoint` has loaded the model."""

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Does nothing: `load_checkpoint` has loaded the optimizer."""

    # ---- the end ----------------------------------------------------------------------------------------

    def teardown(self) -> None:
        """Tears down the environment; module and optimizer stay, as a sharded module cannot move."""
        assert self.cluster_environment is not None and self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()


class _Elsewhere(dict[str, Any]):
    """An empty state dict that stands for values saved from the shards."""


class MetricsCallback(pytorch.Callback):
    """Logs the figures of `flatfsdp.profiling.Metrics`, every `log_every_n_steps` of the Trainer.

        trainer = Trainer(callbacks=[MetricsCallback(tokens=torch.numel)], strategy=FlatFSDPStrategy(...))

    With FlatFSDP's optimizers the gradient norm is among them, unless the Trainer clips.  Validation does not
    count.

    Args:
        tokens: tells the number of tokens in a batch of one rank.
        flops_per_token: operations of forward and backward per token; None: no MFU.
        gemms: precision of the GEMMs.
    """

    def __init__(
        self,
        tokens: Callable[[Any], int],
        flops_per_token: float | None = None,
        gemms: GemmName = "bf16",
    ) -> None:
        self._tokens, self._flops_per_token, self._gemms = tokens, flops_per_token, gemms
        self._paused = ExitStack()

    def on_train_start(self, trainer: pytorch.Trainer, module: pytorch.LightningModule) -> None:
        """Begins the first interval."""
        self._metrics = Metrics(module.device, flops_per_token=self._flops_per_token, gemms=self._gemms)
        self._logged = trainer.global_step
        trainer.profiler = _LoadingProfiler(trainer.profiler, self._metrics)

    def on_train_end(self, trainer: pytorch.Trainer, module: pytorch.LightningModule) -> None:
        """Gives the Trainer its profiler back."""
        if isinstance(trainer.profiler, _LoadingProfiler):
            trainer.profiler = trainer.profiler.of_trainer

    def on_exception(
        self, trainer: pytorch.Trainer, module: pytorch.LightningModule, exception: BaseException
    ) -> None:
        """Gives it back as well, as such a training does not come to its end."""
        self.on_train_end(trainer, module)

    def on_train_batch_end(
        self, trainer: pytorch.Trainer, module: pytorch.LightningModule, outputs: Any, batch: Any, *_: Any
    ) -> None:
        """Counts the batch, and logs after a step."""
        self._metrics.count(self._tokens(batch))
        if trainer.global_step >= self._logged + trainer.log_every_n_steps:
            # After the Trainer's clipping it would be the norm of what is left.
            is_clipped = trainer.gradient_clip_val
            norm = None if is_clipped else getattr(trainer.optimizers[0], "grad_norm", None)
            self._logged, figures = trainer.global_step, self._metrics.report(grad_norm=norm)
            module.log_dict({name: value for name, value in figures.items() if value is not None})

    def on_validation_start(self, trainer: pytorch.Trainer, module: pytorch.LightningModule) -> None:
        """Stops the clock, unless training has not begun."""
        if not trainer.sanity_checking and trainer.state.fn == "fit":
            self._paused.enter_context(self._metrics.paused())

    def on_validation_end(self, trainer: pytorch.Trainer, module: pytorch.LightningModule) -> None:
        """Lets the clock go on."""
        self._paused.close()


class _LoadingProfiler:
    """The Trainer's profiler while it trains, as Lightning tells nobody else when it waits for data."""

    def __init__(self, profiler: pytorch.profilers.Profiler, metrics: Metrics) -> None:
        self.of_trainer, self._metrics, self._wait = profiler, metrics, ExitStack()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.of_trainer, name)

    def start(self, action_name: str) -> None:
        self.of_trainer.start(action_name)
        if action_name.endswith(".train_dataloader_next"):
            self._wait.enter_context(self._metrics.loading())

    def stop(self, action_name: str) -> None:
        if action_name.endswith(".train_dataloader_next"):
            self._wait.close()
        self.of_trainer.stop(action_name)
