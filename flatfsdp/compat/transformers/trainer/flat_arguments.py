"""`FlatArguments`: how `FlatTrainer` shards a model; and which TrainingArguments it does not support.

In:   a model as users bring it, and TrainingArguments.
Out:  the model sharded in place, or an error before anything has changed.
Next: `trainer.py` trains it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from typing_extensions import Unpack

from flatfsdp.compat.training_loops import require_possible, shard_as_ddp
from flatfsdp.compat.transformers.fused.fuse import fuse
from flatfsdp.compat.transformers.initialise import init_weights_of
from flatfsdp.compat.transformers.policy import policy_of
from flatfsdp.contract.claimed import is_unit
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
        async_save: whether a thread writes shards and optimizer of a checkpoint while training goes on.  The
            files for `from_pretrained` are written before.
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
    async_save: bool
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
        async_save: bool = False,
        **options: Unpack[Options],
    ) -> None:
        vars(self).update(policy=policy, fuse=fuse, fp8=fp8, fp8_weights=fp8_weights)
        vars(self).update(replay=replay, shard_others=shard_others, async_save=async_save, options=options)
        require_known("FlatArguments", options)
        ours = "the Trainer says which device this rank has, and the model how it is initialised"
        asked = ((name, options.get(name) is not None, ours) for name in ("device", "param_init_fn"))
        require_possible("FlatArguments", asked)
        if fp8 is not None and not isinstance(fp8, Recipe):
            raise TypeError(f"fp8 is {fp8!r}; pass a recipe of flatfsdp.fp8: DelayedScaling(), for example")
        if fp8_weights and fp8 is None:
            raise ValueError("FlatArguments has fp8_weights and no recipe; pass fp8=DelayedScaling(), say")
        if replay and not options.get("optimize_backward_concat", True):
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
        stored = CurrentScaling() if self.fp8_weights else None
        own = Precision(compute=self._compute_dtype(model, arguments), fp8_weights=stored)
        precision = self.options.get("precision") or own
        options: Options = {**self.options, "precision": precision}
        if is_on_meta:
            options["param_init_fn"] = init_weights_of(model)
        return shard_as_ddp(model, policy, arguments.device, options)

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
        options: Options = {**self.options, "precision": Precision(param=dtype, compute=dtype)}
        shard_as_ddp(model, policy, arguments.device, options)

    def _policy_for(self, model: nn.Module) -> WrapPolicy:
        return policy_of(model) if self.policy is None else self.policy

    def _compute_dtype(self, model: nn.Module, arguments: Any) -> torch.dtype:
        if (precision := self.options.get("precision")) is not None:
            return precision.compute
        return torch.bfloat16 if arguments.bf16 else default_precision(dict(model.named_parameters())).compute

    def _require_only_of_training(self) -> None:
        """Checks that no option is set that takes effect only when a model is sharded."""
        asked = [name for name in ("fp8_weights", "fuse", "policy") if getattr(self, name)]
        asked += sorted(self.options)
        if asked:
            way_out = "say so in shard, or give FlatTrainer the plain model"
            raise ValueError(f"it is sharded already, and FlatArguments has {', '.join(asked)}; {way_out}")


def unsupported(model: Any, given: Any, flat: FlatArguments) -> Iterator[tuple[str, object, str]]:
    """TrainingArguments that FlatTrainer does not support: the name, whether it is set, an alternative."""
    for name, instead in _UNSUPPORTED.items():
        yield name, getattr(given, name, None), instead
    yield "several GPUs in one process", given.n_gpu > 1, "start one for each: torchrun --nproc-per-node N"
    accelerator = given.accelerator_config
    is_uneven = accelerator.even_batches is False
    yield "accelerator_config.even_batches=False", is_uneven, "all ranks have to have as many microbatches"
    syncs = (accelerator.gradient_accumulation_kwargs or {}).get("sync_each_batch")
    instead = 'to reduce gradients in every microbatch, pass FlatArguments(grad_sync="every")'
    yield "gradient_accumulation_kwargs of sync_each_batch", syncs, instead
    optim = str(getattr(given.optim, "value", given.optim))
    instead = f"choose one of {', '.join(OPTIMIZERS)}, or an elementwise one by optimizer_cls_and_kwargs"
    yield f"optim={optim!r}", optim not in OPTIMIZERS, instead
    loads_weights = given.load_best_model_at_end and given.save_only_model
    is_lost = loads_weights and not isinstance(model, PreTrainedModel)
    instead = f"what is saved of a {type(model).__name__} alone is not read back; save the optimizer, too"
    yield "load_best_model_at_end with save_only_model", is_lost, instead
    instead = "it would push a checkpoint that is not complete; push after the training"
    yield "push_to_hub with FlatArguments(async_save=True)", flat.async_save and given.push_to_hub, instead
    # `Trainer` removes all but the best at the end, without asking whether one is being written.
    is_removed = given.save_total_limit == 1 and given.metric_for_best_model is not None
    is_removed = flat.async_save and is_removed and not given.load_best_model_at_end
    instead = "the last checkpoint may be removed while it is written; keep 2"
    yield "save_total_limit=1 of the best with FlatArguments(async_save=True)", is_removed, instead
    is_twice = flat.fuse and given.use_liger_kernel
    yield "use_liger_kernel", is_twice, "FlatArguments(fuse=True) has its own kernels"
    for name, instead in _UNSUPPORTED_IN_REPLAYS.items():
        yield name, flat.replay and getattr(given, name) is not None, instead
    has_lanes = flat.options.get("lanes") is not None
    if is_unit(model):
        has_lanes = model.fsdp_state.policy.lanes is not None
    for name, is_asked, instead in _unsupported_with_lanes(given):
        yield f"lanes with {name}", has_lanes and is_asked, instead
    # TRL's trainers read parameters one by one, and read and collect figures in every microbatch.
    is_of_trl = any(base.__module__.partition(".")[0] == "trl" for base in type(given).__mro__)
    for name, instead in _UNSUPPORTED_IN_TRL.items():
        yield name, is_of_trl and getattr(given, name, False), instead
    yield "FlatArguments(replay=True)", is_of_trl and flat.replay, "TRL's metrics would not run in replays"
    yield "lanes", is_of_trl and has_lanes, "TRL divides losses for an average over ranks; leave lanes out"


def _unsupported_with_lanes(given: Any) -> Iterator[tuple[str, object, str]]:
    """TrainingArguments that make data or losses depend on the number of ranks."""
    accelerator, strategy = given.accelerator_config, given.train_sampling_strategy
    instead = "the order of samples would depend on the number of ranks; leave it out"
    yield f"train_sampling_strategy={strategy!r}", strategy not in ("random", "sequential"), instead
    yield "accelerator_config.use_seedable_sampler=False", not accelerator.use_seedable_sampler, instead
    for name in ("split_batches", "dispatch_batches"):
        yield f"accelerator_config.{name}", getattr(accelerator, name), "each rank takes whole microbatches"
    is_own = not given.average_tokens_across_devices
    instead = "losses are divided by the items of all ranks"
    yield "average_tokens_across_devices=False", is_own, instead


_UNSUPPORTED = {
    **dict.fromkeys(("fsdp", "deepspeed", "parallelism_config"), "FlatFSDP shards; see FlatArguments"),
    "fp16": "train with bf16=True, which needs no loss scaling",
    **dict.fromkeys(("fp16_full_eval", "bf16_full_eval"), "evaluations compute in the dtype of training"),
    "torch_compile": "compile the layers of trainer.model, before it trains: layer.compile()",
    "auto_find_batch_size": "choose per_device_train_batch_size; `python -m flatfsdp plan` tells the memory",
    "save_on_each_node": "checkpoints are written once, by all ranks together",
    "enable_jit_checkpoint": "ranks would save at different times; save every few steps",
    "ddp_broadcast_buffers": "there is no DistributedDataParallel",
}
_UNSUPPORTED_IN_REPLAYS = {
    "neftune_noise_alpha": "hooks would not run in replays",
    "torch_empty_cache_steps": "memory of recorded microbatches is kept",
}
_UNSUPPORTED_IN_TRL = {
    "use_vllm": "its weights are copied from whole parameters; generate with the model itself",
    "use_transformers_continuous_batching": "it casts the model to another dtype; generate batch by batch",
    "sync_ref_model": "it mixes whole parameters; take a reference that stays as it is",
    "activation_offloading": "it takes gathered parameters for activations; use gradient_checkpointing",
    "cast_lm_head_to_fp32": "all parameters are gathered in one dtype; choose FlatArguments(precision=...)",
}
