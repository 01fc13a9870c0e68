"""Scales of a model's FP8 weights, for their current values (current scaling).

In:   the amaxes of this rank's pieces, taken by the optimizer or by `engine/storage/fp8_weights.py`.
Out:  one scale a weight for its group, the same on all ranks.
Next: `engine/storage/group.py` casts the master shards with them.

    amax of this rank's pieces --MAX over ranks, one all-reduce for a whole model--> scale = 448 / amax

Weights that are one operand (`flat/packing.py`) share one scale, from the largest amax among them.

Nothing is remembered from step to step, so a checkpoint has nothing to save of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flatfsdp.byte_ledger import ByteLedger
from flatfsdp.comm.checking.identity import Action
from flatfsdp.comm.checking.journal import launch
from flatfsdp.comm.collectives import raise_to_largest
from flatfsdp.comm.ranks import Ranks
from flatfsdp.engine.storage.fp8_weights import FP8_DTYPE
from flatfsdp.engine.storage.group import FlatGroup
from flatfsdp.flat.layout import FlatLayout
from flatfsdp.fp8.recipe import CurrentScaling
from flatfsdp.kernels.cast.scaling import Scales, align_inverses, current_scales


def weight_scales(groups: Sequence[FlatGroup], ledger: ByteLedger) -> list[WeightScales]:
    """Makes the scales of a model's FP8 weights: one object for each set of ranks that shards some."""
    by_ranks: dict[Ranks, list[FlatGroup]] = {}
    for group in groups:
        if group.fp8 is not None:
            by_ranks.setdefault(group.grid.shard, []).append(group)
    return [WeightScales(members, ledger) for members in by_ranks.values()]


class WeightScales:
    """Scales of all FP8 weights of one model that are sharded over the same ranks.

    Raises:
        ValueError: if units want different scales.
    """

    def __init__(self, groups: Sequence[FlatGroup], ledger: ByteLedger) -> None:
        self._groups = groups
        self._ledger = ledger
        self._ranks = groups[0].grid.shard
        self._recipe = groups[0].unit.policy.precision.fp8_weights
        for group in groups:
            theirs = group.unit.policy.precision.fp8_weights
            if theirs != self._recipe:
                raise ValueError(
                    f"unit {group.name} has fp8_weights={theirs!r}, but unit {groups[0].name} "
                    f"{self._recipe!r}; make them equal"
                )
        self._partners = _partners([group.layout for group in groups], groups[0].master.device)

    @torch.no_grad()
    @torch.inference_mode(False)  # A backward may save them.
    def refresh(self) -> None:
        """Takes new scales if a master shard has changed; collective then, as all ranks step together."""
        if all(group.compute_shard.state.is_scaled for group in self._groups):
            return
        for group in self._groups:
            group.compute_shard.measure()
        weights = [group.fp8 for group in self._groups if group.fp8 is not None]
        amax = torch.cat([each.amax for each in weights])
        if self._ranks.size > 1:
            with launch(self._ranks, self._groups[0].unit.identify(Action.SCALE), amax.device):
                raise_to_largest(amax, self._ranks)
            self._ledger.add("amax", amax.numel() * amax.element_size())
        if self._partners is not None:
            amax = amax[self._partners].amax(dim=1)
        recipe = self._recipe
        assert isinstance(recipe, CurrentScaling)
        scales = current_scales(
            amax,
            torch.full_like(amax, torch.finfo(FP8_DTYPE).max),
            epsilon=recipe.amax_epsilon,
            power_of_two=recipe.power_of_two_scales,
        )
        scale, scale_inv = align_inverses(scales)
        sizes = [each.amax.numel() for each in weights]
        for group, own, own_inv in zip(self._groups, scale.split(sizes), scale_inv.split(sizes), strict=True):
            if not group.compute_shard.state.is_scaled:
                group.compute_shard.set_scales(Scales(own, own_inv))


def _partners(layouts: Sequence[FlatLayout], device: torch.device) -> Tensor | None:
    """Indices of the slots in each slot's run, padded with its own index: int64 [slots, longest run].

    None if every slot is a run by itself.
    """
    runs: list[range] = []
    for layout in layouts:
        start = len(runs)
        for run in layout.runs:
            runs += [range(start + run.first, start + run.last)] * len(run.slots)
    longest = max(map(len, runs), default=1)
    if longest == 1:
        return None
    rows = [[*run, *[slot] * (longest - len(run))] for slot, run in enumerate(runs)]
    return torch.tensor(rows, device=device)
