"""Time of collectives, by how the ranks of a group are placed on hosts.

In:   bytes that each rank sends, and a dimension of the mesh.
Out:  seconds.
Next: `time.py` determines which of them are hidden.

    pp     outermost        ranks of one group are stride apart:   dp * tp
    dp_replicate                                                   dp_shard * tp
    dp_shard                                                       tp
    tp     innermost                                               1

Ranks are numbered host by host, so neighbours share NVLink.  A collective over several hosts moves all bytes
into each host, shared by the group's ranks on it: if these are few, the network is the limit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from flatfsdp.comm.parallelism import Parallelism
from flatfsdp.plan.machine import Machine


@dataclass(frozen=True)
class Group:
    """A rank group along one dimension of the mesh.

    Attributes:
        machine: the machine.
        size: number of ranks.
        stride: distance from one rank to the next.
    """

    machine: Machine
    size: int
    stride: int

    @property
    def in_one_host(self) -> int:
        """The number of its ranks on one host."""
        return min(self.size, max(1, self.machine.gpus_per_host // self.stride))

    def seconds(self, sent: float) -> float:
        """Time of one collective.

        Args:
            sent: bytes that each rank sends.
        """
        if self.size == 1 or not sent:
            return 0.0
        machine, hosts = self.machine, math.ceil(self.size / self.in_one_host)
        if hosts == 1:
            return machine.link_latency + sent / machine.link_bandwidth
        bandwidth = min(machine.link_bandwidth, self.in_one_host * machine.network_bandwidth)
        return machine.link_latency + (hosts - 1) * machine.network_latency + sent / bandwidth


@dataclass(frozen=True)
class Groups:
    """The groups of one rank, by dimension of the mesh."""

    tp: Group
    dp_shard: Group
    dp_replicate: Group
    pp: Group

    @staticmethod
    def of(ranks: Parallelism, machine: Machine) -> Groups:
        """The groups of a mesh on a machine."""
        stride, found = 1, {}
        for name in ("tp", "dp_shard", "dp_replicate", "pp"):
            found[name] = Group(machine, getattr(ranks, name), stride)
            stride *= getattr(ranks, name)
        return Groups(**found)
