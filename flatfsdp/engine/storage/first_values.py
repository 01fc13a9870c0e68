"""The values that a model begins with: checks that ranks began alike, or takes those of one of them.

In:   a digest of each whole parameter, taken when a unit took it (`MasterShard.first_digests`).
Out:  RuntimeError on all ranks, in the first forward, with the name of the first parameter that differs.

Each rank keeps a part of its own values.  Ranks that were seeded differently would train a patchwork of
several initialisations, and no loss would look wrong.  Values that a load, or anybody else, has replaced
since do not count, and replicas need no check: they take the first one's values (`make_equal`).

With `sync_module_states` all ranks take the first rank's values (`comm/agreement.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flatfsdp.comm.checking.identity import Action, Identity
from flatfsdp.comm.checking.journal import declare, launch
from flatfsdp.comm.collectives import broadcast, raise_to_largest
from flatfsdp.comm.ranks import Ranks, several
from flatfsdp.contract.placement import Placement
from flatfsdp.engine.storage.master import MasterShard

_BLOCK = 2**22
"""Elements that are added up together: PyTorch widens them first, to eight bytes each."""


def digest(values: Tensor) -> Tensor:
    """Sum of the values' bits as integers: int64, 0-dim; does not wait for the device."""
    if values.is_meta:
        # A plan's models have no values, and thousands of blocks.
        return values.new_empty((), dtype=torch.int64)
    bits = values.detach().contiguous().view(getattr(torch, f"int{8 * values.element_size()}"))
    return torch.stack([block.sum(dtype=torch.int64) for block in bits.view(-1).split(_BLOCK)]).sum()


def require_same_first_values(masters: Sequence[MasterShard]) -> None:
    """Compares the values that ranks began with.  Collective over all ranks of the model.

    Args:
        masters: the shards of a model that is used.

    Raises:
        RuntimeError: on all ranks, if a parameter's values differ.
    """
    known_of: dict[Ranks, dict[str, Tensor | None]] = {}
    device = torch.device("meta")
    for master in masters:
        device = master.device
        # A write since then may have replaced anything, and the first replica's values all others.
        is_first = master.grid.replicate.rank == 0 and master.is_counted
        digests = master.first_digests if is_first and master.flat._version == master.first_version else {}
        if master.grid.shard.size > 1:
            prefix, slots = master.unit.prefix, master.layout.slots
            of_ranks = known_of.setdefault(master.grid.shard, {})
            of_ranks.update((prefix + slot.name, digests.get(slot)) for slot in slots)
    if not known_of or device.type == "meta":
        return
    unit, identity = masters[0].unit, masters[0].unit.identify(Action.VALUES)
    assert unit.shared.identity is not None
    names = [name for known in known_of.values() for name in known]
    # Numbers fall, so that the largest one is that of the first parameter, and all ranks name the same.
    number, nothing = len(names), torch.zeros((), dtype=torch.int64, device=device)
    first = nothing
    for ranks, known in known_of.items():
        own = torch.stack([nothing if each is None else each.to(device) for each in known.values()])
        replaced = torch.tensor([each is None for each in known.values()], dtype=own.dtype, device=device)
        # The largest of the negatives is the smallest one's.  What one rank has replaced counts on none: of a
        # load into the shards, a rank that has only padding notices nothing.
        extremes = torch.stack([own, -own, replaced])
        with launch(ranks, identity, device):
            raise_to_largest(extremes, ranks)
        differs = (extremes[0] != -extremes[1]) & (extremes[2] == 0)
        numbers = torch.arange(number, number - len(known), -1, device=device)
        first = first.maximum((numbers * differs).amax())
        number -= len(known)
    for ranks in unit.shared.identity.communicators:
        with launch(ranks, identity, device):
            raise_to_largest(first, ranks)
    if found := int(first):
        raise RuntimeError(
            f"parameter {names[len(names) - found]} began with other values on other ranks, and each rank "
            "shards its own; seed all ranks alike before the model is built, pass sync_module_states=True, "
            "which takes the first rank's values, or load a checkpoint before the first forward"
        )


def make_equal(master: MasterShard, identity: Identity | None) -> None:
    """Makes replicas equal, and parameters that all tensor-parallel ranks have whole.  Collective."""
    placement, tensor = master.layout.placement, master.grid.tensor
    if same := several([master.grid.replicate, *([] if placement is Placement.SPLIT else [tensor])]):
        replica = master.flat.detach().to(master.device)
        for ranks in same:
            declare(ranks, identity, master.device)
            broadcast(replica, ranks)
        master.flat.data.copy_(replica)
        master.count_load()
