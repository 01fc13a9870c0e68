"""Runs a function on N ranks: in processes that it starts, or on the ranks that torchrun started.

In:   a function of (rank, payload), importable by name, and a payload that can be pickled.
Out:  what the function returned on rank 0 (under torchrun: on this rank).
Next: `cli/verify.py` gives it the function that trains.

A failing rank ends the others: ranks started here are terminated, and the failing rank's traceback is raised
here; under torchrun, torchrun does this.
"""

from __future__ import annotations

import gc
import os
import pickle
import socket
import sys
import tempfile
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

Payload = TypeVar("Payload")
Result = TypeVar("Result")

# Long enough for a first step, in which each rank reads data and compiles.
TIMEOUT = timedelta(seconds=300)


class Device(str, Enum):
    """Device of the ranks.

    auto: GPUs if there is one for each rank, or else the CPU; cuda: one GPU for each rank; shared_cuda: GPUs,
    of which several ranks may share one, to see with few GPUs that a program for many is right.
    """

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"
    shared_cuda = "shared-cuda"


@dataclass(frozen=True)
class Rank:
    """One rank, as the function sees it; the default process group exists already.

    Attributes:
        index: number of the rank among `world` ranks.
        group: these ranks; None for all.
    """

    index: int
    world: int
    device: torch.device
    group: dist.ProcessGroup | None = None


@dataclass(frozen=True)
class Launch:
    """Number and device of the ranks; checked before any process starts.

    Attributes:
        ranks: number of processes; None means torchrun's, or 2.
        device: device that they run on.
        deterministic: ask torch and cuBLAS for deterministic algorithms only.
    """

    ranks: int | None = None
    device: Device = Device.auto
    deterministic: bool = False

    def __post_init__(self) -> None:
        if under_torchrun() and self.ranks not in (None, self.world):
            raise ValueError(f"--ranks is {self.ranks}, but torchrun has started {self.world}; leave it out")
        if self.world < 1:
            raise ValueError(f"ranks is {self.world}; it must be at least 1")
        gpus = torch.cuda.device_count()
        if self.device is Device.cuda and gpus < self.local_world:
            way_out = "; --device shared-cuda lets ranks share them" if gpus else ""
            raise ValueError(
                f"--device cuda needs one GPU for each of {self.local_world} ranks, not {gpus}{way_out}"
            )
        if self.device is Device.shared_cuda and gpus == 0:
            raise ValueError("--device shared-cuda needs a GPU, and this machine has none")

    @property
    def world(self) -> int:
        """Number of all ranks."""
        if under_torchrun():
            return int(os.environ["WORLD_SIZE"])
        return 2 if self.ranks is None else self.ranks

    @property
    def local_world(self) -> int:
        """Number of ranks on this machine."""
        return int(os.environ.get("LOCAL_WORLD_SIZE", self.world)) if under_torchrun() else self.world

    def use_cuda(self) -> bool:
        """Whether ranks run on GPUs."""
        if self.device is Device.shared_cuda:
            return True
        return self.device is not Device.cpu and torch.cuda.device_count() >= self.local_world


def under_torchrun() -> bool:
    """Whether this process is one of several ranks that torchrun started."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def is_main() -> bool:
    """Whether this process prints and writes files: the parent of the ranks, or torchrun's rank 0."""
    return not under_torchrun() or os.environ["RANK"] == "0"


def run_on_ranks(function: Callable[[Rank, Payload], Result], payload: Payload, launch: Launch) -> Result:
    """Calls `function(rank, payload)` on every rank and returns the result of rank 0.

    Raises:
        torch.multiprocessing.ProcessRaisedException: if a rank started here raised; holds its traceback.
        torch.multiprocessing.ProcessExitedException: if a rank started here died.
    """
    if under_torchrun():
        index, local = int(os.environ["RANK"]), int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
        return _on_rank(index, local, "env://", function, payload, launch)
    with tempfile.TemporaryDirectory(prefix="flatfsdp-") as folder:
        cuda = launch.use_cuda()
        start_and_join(_started, launch.world, Path(folder), function, payload, launch, for_cuda=cuda)
        # A file and not a queue: nobody reads a queue before the ranks have ended, and a full one blocks.
        return pickle.loads(Path(folder, "result").read_bytes())


def fork_server(preload: Sequence[str] = (), *, for_cuda: bool = False) -> ForkServerContext:
    """Context that starts processes in milliseconds, by forking one that has imported everything needed.

    The server imports what this process has imported of the package when the first fork is asked for.  It has
    no threads and has not touched a GPU, so its forks may do both.

    Args:
        preload: names of further modules.
        for_cuda: whether the processes use GPUs.
    """
    imported = [name for name in sys.modules if name.partition(".")[0] == "flatfsdp"]
    if for_cuda:
        # They import other libraries, some of which start CUDA; a process that has done so must not fork.
        imported = [name for name in imported if not name.startswith("flatfsdp.compat")]
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", *imported, *preload])
    return context


def start_and_join(function: Callable[..., None], processes: int, *args: Any, for_cuda: bool = False) -> None:
    """`torch.multiprocessing.spawn` with processes of the fork server: calls `function(index, *args)`."""
    method = fork_server(for_cuda=for_cuda).get_start_method()
    mp.start_processes(function, args, processes, start_method=method)


def _started(
    index: int, folder: Path, function: Callable[[Rank, Any], Any], payload: Any, launch: Launch
) -> None:
    # Imported modules stay for good: collections of garbage, a fifth of a second each, need not look at them.
    gc.freeze()
    # A file in a fresh folder needs no free port, which another program could take first.
    result = _on_rank(index, index, (folder / "rendezvous").as_uri(), function, payload, launch)
    if index == 0:
        Path(folder, "result").write_bytes(pickle.dumps(result))


def _on_rank(
    index: int,
    local: int,
    rendezvous: str,
    function: Callable[[Rank, Any], Any],
    payload: Any,
    launch: Launch,
) -> Any:
    if launch.deterministic:
        # cuBLAS reads it when CUDA starts, so set it before anything below.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    device = take_gpu(local) if launch.use_cuda() else torch.device("cpu")
    # The ranks are the parallelism; a thread per core in each would mostly wait for the others' threads.
    torch.set_num_threads(1)
    dist.init_process_group(
        backend="nccl" if device.type == "cuda" else "gloo",
        init_method=rendezvous,
        rank=index,
        world_size=launch.world,
        timeout=TIMEOUT,
        device_id=device if device.type == "cuda" else None,
    )
    result = function(Rank(index, launch.world, device), payload)
    # A process group must not outlive the interpreter, see `flatfsdp.comm.ranks.Ranks`; reference cycles of
    # meshes and pipeline stages may hold some.
    gc.collect()
    # Only after success: after an exception others may be inside a collective, and this would wait for them.
    dist.destroy_process_group()
    return result


def take_gpu(local: int) -> torch.device:
    """Makes the GPU of a rank this process's current one.  Call it before NCCL has made a communicator.

    NCCL refuses two ranks of one host on one GPU.  Ranks that share a GPU therefore appear to it as ranks of
    several hosts, and exchange data through sockets: slow, but with the same kernels in the same order.

    Args:
        local: the rank's number on this machine, from 0.
    """
    host, gpu = divmod(local, torch.cuda.device_count())
    if host > 0:
        # Machines may have equal names.
        machine = os.environ.get("NCCL_HOSTID", f"{socket.gethostname()}-{uuid.getnode():x}")
        os.environ["NCCL_HOSTID"] = f"{machine}-{host}"
    device = torch.device("cuda", gpu)
    torch.cuda.set_device(device)
    return device
