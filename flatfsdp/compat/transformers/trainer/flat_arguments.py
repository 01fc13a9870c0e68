"""`FlatArguments`: how `FlatTrainer` shards a model; and which TrainingArguments it does not support.

In:   a model as users bring it, and TrainingArguments.
Out:  the model sharded in place, or an error before anything has changed.
Next: `trainer.py` trains it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from typing_extensions import Unpack

from flatfsdp.compat.transformers.fused.fuse import fuse
from flatfsdp.compat.transformers.initialise import init_weights_of
from flatfsdp.compat.transformers.policy import policy_of
from flatfsdp.contract.claimed import is_unit
from flatfsdp.engine.api.shard import shard
from flatfsdp.engine.api.wrap import WrapPolicy
from flatfsdp.fp8 import CurrentScaling, Recipe
from flatfsdp.layers import convert
from flatfsdp.options import Options, Precision, default_precision, require_known

OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "sgd", "rmsprop", "adagrad")
"""Values of `TrainingArguments.optim` that select elementwise optimizers of PyTorch."""


@dataclass(frozen=True, init=False)
class FlatArguments:
    """How FlatTrainer shards and computes a model, beyond TrainingArguments.

    Attributes:
        policy: which modules become units; None: the layers that transformers names (`policy_of`).
        fuse: whether our kernels compute the parts that they support (`fuse`).
        fp8: FP8 recipe of the layers' linear maps; None: no FP8.
        fp8_weights: whether the flat buffers hold weights in FP8, one byte per element.
        replay: whether microbatches become CUDA graphs (`flatfsdp.replayed`).
        shard_others: whether models that the trainer only evaluates (references, rewards) are sharded, too,
            by the same policy.  Otherwise each rank holds them whole.
        options: options of `flatfsdp.shard`, given by name; see `Options`.  Without `precision`, masters are
            FP32 and computation is in bf16 with `TrainingArguments(bf16=True)` or for a bf16 model, and else
            in FP32.  All ranks start from the first one's values unless sync_module_states=False.

    Raises:
        TypeError: if `fp8` is no recipe; for an unknown option.
        ValueError: for `device` and `param_init_fn`, which the Trainer and the model determine; for
            `fp8_weights` without `fp8`; for `replay` without `optimize_backward_concat`.
    """

    policy: WrapPolicy | None
    fuse: bool
    fp8: Recipe | None
    fp8_weights: bool
    replay: bool
    shard_others: bool
    options: Options

    def __init__(
        self,
        policy: WrapPolicy | None = None,
        *,
        fuse: bool = False,
        fp8: Recipe | None = None,
        fp8_weights: bool = False,
        replay: bool = False,
        shard_others: bool = False,
        **options: Unpack[Options],
    ) -> None:
        vars(self).update(
            policy=policy,
            fuse=fuse,
            fp8=fp8,
            fp8_weights=fp8_weights,
            replay=replay,
            shard_others=shard_others,
            options=options,
        )
        require_known("FlatArguments", options)
        for name in ("device", "param_init_fn"):
            if options.get(name) is not None:
                raise ValueError(
                    f"FlatArguments cannot do {name}: the Trainer says which device this rank has, and the "
                    "model how it is initialised"
                )
        if self.fp8 is not None and not isinstance(self.fp8, Recipe):
            raise TypeError(
                f"fp8 is {self.fp8!r}; pass a recipe of flatfsdp.fp8: DelayedScaling(), CurrentScaling() or "
                "BlockScaling()"
            )
        if self.fp8_weights and self.fp8 is None:
            raise ValueError("FlatArguments has fp8_weights and no recipe; pass fp8=DelayedScaling(), say")
        if self.replay and not options.get("optimize_backward_concat", True):
            raise ValueError("replay needs optimize_backward_concat=True: graphs write to flat gradients")

    def prepare(self, model: Any, arguments: Any) -> nn.Module:
        """Fuses or converts the model, and shards it in place on the device of these TrainingArguments.

        It starts from the first rank's values.  Collective.

        Args:
            model: plain, or already sharded.
            arguments: TrainingArguments.

        Returns:
            The model.

        Raises:
            RuntimeError: if ranks have different models.
            ValueError: if it is already sharded and options ask for another sharding; if `policy_of`, `fuse`
                or `shard` refuses it.
        """
        if is_unit(model):
            self._require_only_of_training()
            return model
        policy = self._policy_for(model)
        is_on_meta = any(parameter.is_meta for parameter in model.parameters())
        if self.fuse:
            fuse(model, fp8=self.fp8 is not None)
        elif self.fp8 is not None:
            convert(model)
        precision = self.options.get("precision") or Precision(
            compute=self._compute_dtype(model, arguments),
            fp8_weights=CurrentScaling() if self.fp8_weights else None,
        )
        options = self._with(arguments, precision)
        if is_on_meta:
            options["param_init_fn"] = init_weights_of(model)
        return shard(model, policy, **options)

    def prepare_other(self, model: nn.Module, arguments: Any) -> None:
        """Shards a model that is evaluated only, in the dtype that it computes in.

        It starts from the first rank's values.  Collective.

        Args:
            model: plain.
            arguments: TrainingArguments.

        Raises:
            RuntimeError: if ranks have different models.
            ValueError: if `policy_of` or `shard` refuses it.
        """
        policy = self._policy_for(model)
        dtype = self._compute_dtype(model, arguments)
        # No optimizer needs masters of its weights.
        shard(model, policy, **self._with(arguments, Precision(param=dtype, compute=dtype)))

    def _with(self, arguments: Any, precision: Precision) -> Options:
        """The options of `shard`, with the Trainer's device and this precision."""
        # As under DistributedDataParallel: programs need not seed all ranks alike.
        options: Options = {"sync_module_states": True, **self.options}
        return {**options, "device": arguments.device, "precision": precision}

    def _policy_for(self, model: nn.Module) -> WrapPolicy:
        return policy_of(model) if self.policy is None else self.policy

    def _compute_dtype(self, model: nn.Module, arguments: Any) -> torch.dtype:
        if (precision := self.options.get("precision")) is not None:
            return precision.compute
        return torch.bfloat16 if arguments.bf16 else default_precision(dict(model.named_parameters())).compute

    def _require_only_of_training(self) -> None:
        """Checks that no option is set that takes effect only when a model is sharded."""
        plain = FlatArguments()
        of_sharding = {field.name for field in fields(self)} - {"fp8", "replay", "shard_others", "options"}
        asked = [name for name in sorted(of_sharding) if getattr(self, name) != getattr(plain, name)]
        asked += sorted(self.options)
        if asked:
            raise ValueError(
                f"the model is sharded already, and FlatArguments has {', '.join(asked)}; say so where it is "
                "sharded, or give FlatTrainer the plain model"
            )


def require_possible(model: Any, arguments: Any, flat: FlatArguments) -> None:
    """Checks that FlatTrainer supports these TrainingArguments.

    Raises:
        ValueError: if not; the message lists the options with alternatives.
    """
    found = _impossible(model, arguments, flat)
    reasons = [f"{what}: {instead}" for what, is_asked, instead in found if is_asked]
    if reasons:
        raise ValueError("FlatTrainer cannot do what TrainingArguments ask for:\n" + "\n".join(reasons))


def _impossible(model: Any, given: Any, flat: FlatArguments) -> Iterator[tuple[str, bool, str]]:
    """Unsupported options: the name, whether it is set, and an alternative."""
    accelerator = given.accelerator_config
    accumulation = accelerator.gradient_accumulation_kwargs or {}
    ours = "FlatFSDP shards the model; see FlatArguments"
    yield "fsdp", bool(given.fsdp), ours
    yield "deepspeed", bool(given.deepspeed), ours
    yield "parallelism_config", getattr(given, "parallelism_config", None) is not None, ours
    yield "fp16", given.fp16, "train with bf16=True, which needs no loss scaling"
    for name in ("fp16_full_eval", "bf16_full_eval"):
        yield name, getattr(given, name), "evaluations compute in the dtype of training"
    yield (
        "torch_compile",
        given.torch_compile,
        "compile the layers of trainer.model, before it trains: layer.compile()",
    )
    yield (
        "auto_find_batch_size",
        given.auto_find_batch_size,
        "choose per_device_train_batch_size; `python -m flatfsdp plan` tells how much memory a model takes",
    )
    yield (
        "several GPUs in one process",
        given.n_gpu > 1,
        "start one process for each: torchrun --nproc-per-node N",
    )
    yield "save_on_each_node", given.save_on_each_node, "checkpoints are written once, by all ranks together"
    yield (
        "enable_jit_checkpoint",
        getattr(given, "enable_jit_checkpoint", False),
        "ranks would save at different times; save every few steps",
    )
    yield "ddp_broadcast_buffers", bool(given.ddp_broadcast_buffers), "there is no DistributedDataParallel"
    yield (
        "accelerator_config.even_batches=False",
        accelerator.even_batches is False,
        "all ranks have to have as many microbatches",
    )
    yield (
        "gradient_accumulation_kwargs of sync_each_batch",
        bool(accumulation.get("sync_each_batch")),
        "gradients are reduced in the last microbatch of a step",
    )
    optim = str(getattr(given.optim, "value", given.optim))
    yield (
        f"optim={optim!r}",
        optim not in OPTIMIZERS,
        f"choose one of {', '.join(OPTIMIZERS)}, or pass optimizer_cls_and_kwargs=(a class that computes "
        "element by element, {...})",
    )
    yield (
        "load_best_model_at_end with save_only_model",
        given.load_best_model_at_end and given.save_only_model and not isinstance(model, PreTrainedModel),
        f"what is saved of a {type(model).__name__} alone is not read back; save the optimizer, too",
    )
    yield from _impossible_in_trl(given, flat)
    if flat.fuse:
        yield "use_liger_kernel", given.use_liger_kernel, "FlatArguments(fuse=True) has its own kernels"
    if flat.replay:
        yield "neftune_noise_alpha", given.neftune_noise_alpha is not None, "hooks would not run in replays"
        yield (
            "torch_empty_cache_steps",
            given.torch_empty_cache_steps is not None,
            "memory of recorded microbatches is kept",
        )


def _impossible_in_trl(given: Any, flat: FlatArguments) -> Iterator[tuple[str, bool, str]]:
    """Unsupported options of TRL's trainers, which read parameters one by one, or whatever is saved."""
    is_of_trl = any(base.__module__.partition(".")[0] == "trl" for base in type(given).__mro__)
    for name, instead in _IMPOSSIBLE_IN_TRL.items():
        yield name, is_of_trl and bool(getattr(given, name, False)), instead
    # They read and collect figures in every microbatch.
    yield "FlatArguments(replay=True)", is_of_trl and flat.replay, "TRL's metrics would not run in replays"


_IMPOSSIBLE_IN_TRL = {
    "use_vllm": "its weights are copied from whole parameters; generate with the model itself",
    "use_transformers_continuous_batching": "it casts the model to another dtype; generate batch by batch",
    "sync_ref_model": "it mixes whole parameters; take a reference that stays as it is",
    "activation_offloading": "it takes gathered parameters for activations; use gradient_checkpointing",
    "cast_lm_head_to_fp32": "all parameters are gathered in one dtype; choose FlatArguments(precision=...)",
}
