"""`BackgroundSave`: a thread writes a copy of the state while training goes on.

In:   the state dict of a save, and its `Writer`.
Out:  the checkpoint that `save` would have written; an error of the thread, at the next call on every rank.
Next: `saving.py` writes the copy; `CheckpointManager` and `FlatTrainer` save with it.

    this thread    check, copy to host memory | train ................ | wait: learn how the save has ended
    background     -------------------------- | write, commit, tidy    |

The copying is torch.distributed.checkpoint's own.  The thread is not that of `dcp.async_save`, because older
checkpoints are removed in it after the commit, before anyone is told that the save has ended.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any
from weakref import WeakMethod

import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint._state_dict_stager import StateDictStager

from flatfsdp.checkpoint.errors import CheckpointError, reason
from flatfsdp.checkpoint.saving import write_state
from flatfsdp.checkpoint.stages import raising_on_all, world_of
from flatfsdp.checkpoint.writer import Writer
from flatfsdp.comm.device import on_device
from flatfsdp.comm.objects import all_gather_object, broadcast_object
from flatfsdp.comm.ranks import ALONE, Ranks, default_group
from flatfsdp.engine.whole.units import Model
from flatfsdp.torch_private import call_before_shutdown, new_group, timeout_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _InFlight:
    """A save that the thread writes, and the ranks that have to learn its end."""

    ending: Future[CheckpointError | None]
    world: Ranks
    device: torch.device


class BackgroundSave:
    """Writes checkpoints in a thread, one at a time.

    It keeps host memory for one copy of this rank's state, pinned if the model is on a GPU, as long as it
    lives itself.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._in_flight: _InFlight | None = None
        # What depends on the model's ranks and device: made by the first save.
        self._stager: StateDictStager | None = None
        self._ranks = ALONE
        # A program that ends without `wait` does not break off its last save.  `atexit` would be too late:
        # executors take no work any more then, and one of them hashes what is written.
        threading._register_atexit(_join_if_alive, WeakMethod(self.join))  # type: ignore[attr-defined]

    def start(
        self, name: str, writer: Writer, state: dict[str, Any], model: Model, then: Callable[[], None]
    ) -> None:
        """Copies a state dict to host memory and begins to write it.  Collective over all ranks.

        Nothing of the model is read after it returns.  The save before has to have ended, see `wait`.

        Args:
            name: name of the save for messages, such as "step 100".
            writer: where to write.
            state: state dict, see `sharded_training_state`.
            model: the model, or this rank's stages of a pipeline.
            then: called by the thread of every rank after the save is complete.

        Raises:
            TypeError: on every rank, if `load` would refuse the writer's `extra`.
            CheckpointError: on every rank, if one has no memory for the copy.
        """
        assert self._in_flight is None, "wait for the save before"
        world, device = world_of(model)
        if self._stager is None:
            self._ranks = self._own_ranks(world, device)
            # Not the public DefaultStager: torch 2.11's works once, and drops its memory.
            self._stager = StateDictStager(pin_memory=device.type == "cuda")
        with raising_on_all(model), on_device(device):
            writer.require_extra()
            copy = _joined(state, self._stager.stage(_taken_apart(state), non_blocking=True))
            if device.type == "cuda":
                # The next optimizer step overwrites what is copied, and the thread reads the copies.
                torch.cuda.synchronize(device)
        ending = self._pool.submit(self._write, name, writer, copy, device, then)
        self._in_flight = _InFlight(ending, world, device)

    def wait(self) -> None:
        """Waits until the save in flight, if there is one, has ended.  Collective over all ranks.

        Raises:
            CheckpointError: on every rank, once, if it has failed on any rank.
        """
        if self._in_flight is None:
            return
        told = self._in_flight.ending.result()
        world, device = self._in_flight.world, self._in_flight.device
        self._in_flight = None
        for theirs in all_gather_object(told, world, device):
            if theirs is not None:
                raise theirs

    def join(self) -> None:
        """Waits for this rank's thread alone, while an error is on its way; not collective.

        Threads of other ranks need no help of their main threads, so this ends if their processes live or
        die, but not if they hang.  What has gone wrong was logged by the thread.
        """
        if self._in_flight is not None:
            wait([self._in_flight.ending])

    def _write(
        self,
        name: str,
        writer: Writer,
        state: dict[str, Any],
        device: torch.device,
        then: Callable[[], None],
    ) -> CheckpointError | None:
        """Writes a save; returns its error, because one that is raised would keep the process group alive."""
        try:
            # The current device of a new thread is the first GPU, which may be another rank's.
            with on_device(device):
                write_state(writer, state, self._ranks.group)
            then()
        except Exception as error:
            rank = self._ranks.rank
            what = str(error) if isinstance(error, CheckpointError) else f"rank {rank}: {reason(error)}"
            failure = CheckpointError(f"the save of {name} has failed in the background: {what}")
            # At once, as the next call may be far away, or never come.
            if rank == 0:
                logger.error("%s", failure)
            return failure
        return None

    def _own_ranks(self, world: Ranks, device: torch.device) -> Ranks:
        """All ranks over a communicator for the thread alone.

        Collectives of two threads over one communicator would meet in another order on each rank.
        """
        everyone = default_group()
        if everyone is None:
            return ALONE
        # Groups of the same ranks need different names, and those of an earlier run's are used up.
        name = broadcast_object(uuid.uuid4().hex[:12], [world], device)
        # gloo sends tensors of the CPU from any thread, without the GPU.
        group = new_group(range(world.size), f"saves {name}", backend="gloo", timeout=timeout_of(everyone))
        # So that a program which destroys its groups does not break off its last save.
        call_before_shutdown(group, self.join, also_at_exit=False)
        return Ranks.of(group)


def _join_if_alive(join: WeakMethod[Callable[[], None]]) -> None:
    if (method := join()) is not None:
        method()


def _taken_apart(value: Any) -> Any:
    """A state dict with lists of tensors in place of ShardedTensors, which DCP's stager cannot copy."""
    if isinstance(value, ShardedTensor):
        return [shard.tensor for shard in value.local_shards()]
    return {key: _taken_apart(each) for key, each in value.items()} if isinstance(value, dict) else value


def _joined(value: Any, copy: Any) -> Any:
    """The copy of what `_taken_apart` returned, with the ShardedTensors of `value`, which now hold copies."""
    if isinstance(value, ShardedTensor):
        for shard, tensor in zip(value.local_shards(), copy, strict=True):
            shard.tensor = tensor
        return value
    return {key: _joined(each, copy[key]) for key, each in value.items()} if isinstance(value, dict) else copy
