"""Scales of a model's FP8 weights, for their current values (current scaling).

In:   the amaxes of this rank's pieces, taken by the optimizer or by `engine/storage/fp8_storage.py`.
Out:  one scale a weight for its group, the same on all ranks.
Next: `engine/storage/fp8_storage.py` casts the master shards with them.

    amax of this rank's pieces --MAX over ranks, one all-reduce for a whole model--> scale = 448 / amax

Weights that are one operand (`flat/pack_candidates.py`) share one scale, from the largest amax among them.

Nothing is remembered from step to step, so a checkpoint has nothing to save of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from flatfsdp.comm.checking.identity import Action
from flatfsdp.comm.checking.journal import launch
from flatfsdp.comm.collectives import raise_to_largest
from flatfsdp.comm.ranks import Ranks
from flatfsdp.engine.storage.fp8_storage import FP8_DTYPE, FP8Shard
from flatfsdp.engine.storage.group import FlatGroup
from flatfsdp.kernels.cast.scaling import Scales, align_inverses, current_scales


def weight_scales(groups: Sequence[FlatGroup]) -> list[WeightScales]:
    """Makes the scales of a model's FP8 weights: one object for each set of ranks that shards some."""
    by_ranks: dict[Ranks, list[FP8Shard]] = {}
    for group in groups:
        if isinstance(group.compute_shard, FP8Shard):
            by_ranks.setdefault(group.grid.shard, []).append(group.compute_shard)
    return [WeightScales(members) for members in by_ranks.values()]


class WeightScales:
    """Scales of all FP8 weights of one model that are sharded over the same ranks.

    Raises:
        ValueError: if units want different scales.
    """

    def __init__(self, shards: Sequence[FP8Shard]) -> None:
        self._shards = shards
        masters = [shard.master for shard in shards]
        self._unit, self._ranks = masters[0].unit, masters[0].grid.shard
        self._recipe: Any = self._unit.policy.precision.fp8_weights
        for unit in (master.unit for master in masters):
            if (theirs := unit.policy.precision.fp8_weights) != self._recipe:
                raise ValueError(
                    f"unit {unit.name} has fp8_weights={theirs!r}, others {self._recipe!r}; make them equal"
                )
        runs = [run for master in masters for run in master.layout.runs]
        self._num_runs = len(runs)
        # By slot, the number of its run.
        numbers = [number for number, run in enumerate(runs) for _ in run.slots]
        self._run_of = torch.tensor(numbers, device=masters[0].device)

    @torch.no_grad()
    @torch.inference_mode(False)  # A backward may save them.
    def refresh(self) -> None:
        """Takes new scales if a master shard has changed; collective then, as all ranks step together."""
        # The same on all ranks, so that all launch the collective or none does.
        if all(shard.state.is_scaled for shard in self._shards):
            return
        for shard in self._shards:
            shard.measure()
        amax = torch.cat([shard.amax for shard in self._shards])
        if self._ranks.size > 1:
            with launch(self._ranks, self._unit.identify(Action.SCALE), amax.device):
                raise_to_largest(amax, self._ranks)
            self._unit.shared.ledger.add("amax", amax.nbytes)
        if self._num_runs < amax.numel():
            # A NaN of one slot is one of its whole run.
            of_runs = amax.new_zeros(self._num_runs).scatter_reduce(0, self._run_of, amax, "amax")
            amax = of_runs[self._run_of]
        limit, recipe = torch.full_like(amax, torch.finfo(FP8_DTYPE).max), self._recipe
        epsilon, power_of_two = recipe.amax_epsilon, recipe.power_of_two_scales
        scales = current_scales(amax, limit, epsilon=epsilon, power_of_two=power_of_two)
        scale, scale_inv = align_inverses(scales)
        sizes = [shard.amax.numel() for shard in self._shards]
        for shard, *own in zip(self._shards, scale.split(sizes), scale_inv.split(sizes), strict=True):
            # Others have the same values as before, and setting scales would make them be cast again.
            if not shard.state.is_scaled:
                shard.set_scales(Scales(*own))
