"""Settings that the user chooses: `Options`, and frozen dataclasses that check their values.

Next: `engine/build/build_unit.py` makes a `Policy` of what lasts; nothing else in the engine takes flags.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, TypedDict, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from flatfsdp.comm.checking.identity import DEFAULT_TIMEOUT
from flatfsdp.comm.lanes import Lanes
from flatfsdp.contract.foreign_words import DTYPES, answering
from flatfsdp.contract.recipe import CurrentScaling

logger = logging.getLogger(__name__)

GradSync = Literal["last", "every", "auto"]
"""When gradients are reduce-scattered: in the last microbatch's backward, or in every one's; "auto" is one of
the two.  Replicas are reduced in the last one either way."""


@answering(DTYPES)
@dataclass(frozen=True)
class Precision:
    """Dtypes of a parameter on its way through one step; all floating-point.

    Attributes:
        param: dtype of the master shard, which the optimizer updates.
        compute: dtype of unsharded parameters, and of FP32 inputs where they meet these (`cast_inputs`).
        accumulate: dtype in which microbatches are added up: in the flat gradient buffer (`main_grad`), or
            with `grad_sync="every"` in the sum on the shard, and then `main_grad` is in bf16 if `reduce` is.
        reduce: dtype of gradients in the reduce-scatter.
        grad: dtype of the reduced shard; None means `param`.  If the two are the same, the gradient is in the
            flat parameter's `.grad`, otherwise in its `.main_grad`, for optimizers that look there.
        buffer: dtype of floating-point module buffers; None leaves them as they are.
        fp8_weights: scaling of weights that are stored in FP8 (E4M3), one byte an element, instead of
            `compute`.  These are the weights that every layer which has them multiplies in FP8, such as
            `flatfsdp.layers` and layers made by its `convert`.  Such a model runs inside `fp8.autocast`, with
            any recipe that has one scale a tensor.  None keeps all weights in `compute`.  "in_layers" does
            so, too, but in the flat buffers that FP8 weights would have.  It serves comparisons: over three
            ranks or more, the order of sums depends on where shards are cut.
    """

    param: torch.dtype = torch.float32
    compute: torch.dtype = torch.float32
    accumulate: torch.dtype = torch.float32
    reduce: torch.dtype = torch.float32
    grad: torch.dtype | None = None
    buffer: torch.dtype | None = None
    fp8_weights: CurrentScaling | Literal["in_layers"] | None = None

    def __post_init__(self) -> None:
        if self.fp8_weights not in (None, "in_layers") and not isinstance(self.fp8_weights, CurrentScaling):
            raise ValueError(
                f"Precision.fp8_weights is {self.fp8_weights!r}; it must be a CurrentScaling or None"
            )
        for field, dtype in vars(self).items():
            if field == "fp8_weights" or (dtype is None and field in ("grad", "buffer")):
                continue
            if not isinstance(dtype, torch.dtype) or dtype not in _PLAIN_FLOATS:
                names = ", ".join(str(d) for d in _PLAIN_FLOATS)
                raise ValueError(f"Precision.{field} is {dtype!r}; it must be one of {names}")
        if isinstance(self.fp8_weights, CurrentScaling) and torch.float64 in (self.param, self.compute):
            raise ValueError(
                f"weights are cast to FP8 from FP32, bf16 or fp16, not {self.param} and {self.compute}"
            )


_PLAIN_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True)
class Prefetch:
    """Number of units gathered ahead of the running one; 0 turns prefetching off.

    Each unit gathered ahead costs the memory of its unsharded parameters.  The order is the one that the
    previous forward recorded, so the first step does not prefetch.
    """

    forward: int = 1
    backward: int = 1

    def __post_init__(self) -> None:
        for field, depth in vars(self).items():
            if not isinstance(depth, int) or depth < 0:
                raise ValueError(f"Prefetch.{field} is {depth!r}; it must be an integer >= 0")


def default_precision(parameters: Mapping[str, Tensor]) -> Precision:
    """Precision of a model whose user names none: it computes in bf16 if most of its elements are bf16.

    What is trained is updated in FP32 either way.

    Args:
        parameters: the model's parameters, by name.

    Raises:
        ValueError: for a float64 parameter, which FP32 would round, and for an fp16 one, which needs a scale.
    """
    elements: Counter[torch.dtype] = Counter()
    for name, parameter in parameters.items():
        elements[parameter.dtype] += parameter.numel()
        if parameter.dtype == torch.float64:
            raise ValueError(
                f"parameter {name} is float64, and FP32 is the default precision; convert the module, or "
                "pass precision=Precision(...) with float64 as param, compute, accumulate and reduce"
            )
        if parameter.dtype == torch.float16:
            raise ValueError(
                f"parameter {name} is fp16, whose gradients need a loss scale; convert the module to bf16, "
                "or pass precision=Precision(compute=torch.float16) and train with a GradScaler"
            )
    if 2 * elements[torch.bfloat16] <= elements.total():
        return Precision()
    wide = [name for name, parameter in parameters.items() if parameter.dtype == torch.float32]
    if wide:
        logger.warning(
            "the model computes in bf16, as most of its parameters are bf16; %d are FP32, and are rounded to "
            "bf16 where they are used: %s. Pass precision=Precision() to compute in FP32",
            len(wide),
            ", ".join([*wide[:3], "..."] if len(wide) > 3 else wide),
        )
    return Precision(compute=torch.bfloat16)


def require_flag(name: str, value: object) -> None:
    """Raises TypeError unless the value of an option is True or False."""
    if isinstance(value, bool):
        return
    hint = ""
    if name == "reshard_after_forward" and isinstance(value, int):
        hint = ". A number is FSDP2's; here dp_shard= shards over fewer ranks"
    raise TypeError(f"{name} is {value!r}; it must be True or False{hint}")


@dataclass(frozen=True)
class Debug:
    """Checks that find mistakes while a program runs.

    Attributes:
        check_collectives: check in every gather and reduction that all ranks run it for the same unit and
            purpose; if they differ, all ranks raise instead of computing with a mix of units.  Costs 8 bytes
            a rank in each of them.
        poison_on_free: freed buffers read as NaN.  Costs the memory that freeing saves.
    """

    check_collectives: bool = True
    poison_on_free: bool = False

    def __post_init__(self) -> None:
        for field, value in vars(self).items():
            require_flag(f"Debug.{field}", value)


@dataclass(frozen=True)
class Policy:
    """The settings of one unit that last as long as it does; `Options` documents them."""

    precision: Precision
    cast_inputs: bool = True
    reshard_after_forward: bool = True
    optimize_backward_concat: bool = True
    grad_sync: GradSync = "last"
    lanes: Lanes | None = None
    prefetch: Prefetch = Prefetch()
    cpu_offload: bool = False
    timeout: float = DEFAULT_TIMEOUT
    debug: Debug = Debug()

    @staticmethod
    def of(options: Mapping[str, Any]) -> Policy:
        """Those of a user's options, and a precision in any case, that last."""
        return Policy(**{each.name: options[each.name] for each in fields(Policy) if each.name in options})

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.type == "bool":
                require_flag(field.name, getattr(self, field.name))
        if not isinstance(self.timeout, (int, float)) or not self.timeout >= 0.001:
            raise ValueError(f"timeout is {self.timeout!r}; it must be a number of seconds, at least 0.001")
        for name, kind in (("precision", Precision), ("prefetch", Prefetch), ("debug", Debug)):
            if not isinstance(value := getattr(self, name), kind):
                raise TypeError(f"{name} is {value!r}; pass {kind.__name__}(...)")
        object.__setattr__(self, "lanes", Lanes.of(self.lanes))
        if self.lanes is not None and self.grad_sync != "last":
            raise ValueError(f'lanes say when gradients are reduced; leave out grad_sync="{self.grad_sync}"')
        if self.grad_sync not in get_args(GradSync):
            raise ValueError(f"grad_sync is {self.grad_sync!r}; it must be one of {get_args(GradSync)}")


@dataclass(frozen=True)
class Division:
    """Divisors of gradients before and after the sum over ranks, instead of the mean.

    Dividing by `before` ahead of the sum, and by `after` behind it, keeps a sum in a narrow dtype in range.
    """

    before: float
    after: float

    def __post_init__(self) -> None:
        for field, value in vars(self).items():
            if not value > 0:
                raise ValueError(f"gradients cannot be divided by {value!r} {field} the sum; it must be > 0")


@dataclass(frozen=True)
class Gathering:
    """The ranks that get whole parameters, and the device for them.

    Attributes:
        rank0_only: only the first rank of the grid gets them; on others the parameters stay as they are.
        offload_to_cpu: put them in CPU memory, so that the device never holds more than one unit.
    """

    rank0_only: bool = False
    offload_to_cpu: bool = False


class Options(TypedDict, total=False):
    """Keyword arguments of `shard`, `auto_wrap` and `FlatFSDP`; all have a default.

    Attributes:
        mesh: the data-parallel ranks.  A 1-D mesh shards over its ranks; a 2-D one is (replicate, shard), so
            that a mesh of (N, 1) replicates only: parameters stay whole on every rank, and gradients are
            all-reduced.  Default: shard over all ranks, or this process alone without torch.distributed.
            `DeviceMesh.from_group(group, "cuda")` makes a mesh of a process group.
        dp_shard: instead of mesh, number of neighbouring ranks that share one copy of the parameters (HSDP):
            those of a host, say.  Such groups are replicas of each other, as in a mesh of (ranks / dp_shard,
            dp_shard).
        tp_group: ranks over which the layers inside are split (tensor parallelism); pass the data-parallel
            ranks, which have the same parts, as mesh.  A parameter that no layer declares as split must have
            the same value and the same gradient on all of tp_group.  `state_dict()` and
            `summon_full_params()` give this rank's parts; `checkpoint.full_state_dict` gives whole tensors.
        device: where shards, buffers and compute live; default: where the module is.  Needed for a module on
            the meta device, whose parameters are made and initialised unit by unit.
        param_init_fn: initialises the tensors that a module on the meta device owns directly; default: its
            `reset_parameters()`.  Seed all ranks alike.
        sync_module_states: copy the first data-parallel rank's parameters and buffers to the others, for
            ranks that were not seeded alike.  Default: False.
        precision: dtypes of parameters, compute, accumulation, reduction and buffers.  By default all are
            FP32, and `compute` is bf16 if most elements of the parameters are.
        cast_inputs: cast FP32 tensors to `precision.compute` where parameters meet them: the first argument
            of a unit inside another, and the arguments of the outermost one's modules that own parameters, if
            the first one is in FP32.  Labels that only the outermost forward reads, other dtypes, and tensors
            in lists, dicts and objects stay what they are.  False casts nothing of this unit's.  Default:
            True.
        reshard_after_forward: True, the default, reshards parameters after each forward and backward
            (ZeRO-3); False does so after the last microbatch's backward (ZeRO-2).
        optimize_backward_concat: True, the default, lets each gradient land in the flat buffer that is
            reduced.  False is the baseline: autograd concatenates all gradients of a unit in every
            microbatch.  The bits are the same.
        grad_sync: "last", the default, reduce-scatters gradients in the last microbatch's backward; "every"
            does so in each microbatch's, which needs no full-size gradient buffer in between and moves M
            times the bytes for M microbatches.  Replicas of a 2-D mesh are reduced in the last backward
            either way.  "auto" is "every" if with "last" too little of the GPU's memory were left for
            activations, see `engine/whole/grad_sync.py`; it says once what it has chosen.
        lanes: None, the default, lets the communication library choose in which order gradients are added.  A
            number, or `Lanes`, fixes the order, so that any number of ranks that divides it computes the same
            bits: see `comm/lanes.py`.  Gradients are then added and not averaged: divide each loss by the
            number of microbatches, or of tokens, of the whole step over all ranks.
        prefetch: number of units to gather ahead, in forward and in backward; default: `Prefetch()`, one.
        cpu_offload: keep master shards, their gradients and therefore the optimizer state in CPU memory.
            Default: False.
        timeout: seconds that a rank waits for the others in a gather, reduction or checkpoint of the model
            before it raises and names the missing ranks; 60 by default, and five times as long until the
            first step has ended.  Choose more than a rank ever spends alone, in saving for example;
            `math.inf` leaves it to the timeout of the process group, which also holds for what belongs to no
            unit: set it by `torch.distributed.init_process_group(timeout=...)`.
        debug: checks that find mistakes; default: `Debug()`.
    """

    mesh: DeviceMesh | None
    dp_shard: int | None
    tp_group: dist.ProcessGroup | None
    device: torch.device | str | None
    param_init_fn: Callable[[nn.Module], None] | None
    sync_module_states: bool
    precision: Precision | None
    cast_inputs: bool
    reshard_after_forward: bool
    optimize_backward_concat: bool
    grad_sync: GradSync
    lanes: int | Lanes | None
    prefetch: Prefetch
    cpu_offload: bool
    timeout: float
    debug: Debug


def require_known(function: str, options: Mapping[str, Any]) -> None:
    """Checks names, before anything has changed.

    Args:
        function: name of what the user called, for the message.
        options: keyword arguments.

    Raises:
        TypeError: for an unknown option.
    """
    unknown = next((name for name in options if name not in Options.__annotations__), None)
    if unknown is not None:
        raise TypeError(f"{function}() got an unexpected keyword argument {unknown!r}")
