"""The GPU of each rank: one of its own, or, where there are more ranks than GPUs, one that it shares.

In:   a rank's number on its machine.
Out:  its device, which is the process's current one from then on.
Next: `launch.py` gives it to the process group.
"""

from __future__ import annotations

import os
import socket
import uuid

import torch


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
