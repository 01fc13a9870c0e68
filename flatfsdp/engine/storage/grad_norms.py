"""Norms of the gradients of single parameters, over all ranks that have parts of them.

In:   the gradients in `.grad` of all parameters that an optimizer has of a model (`shard_grad.py`).
Out:  the norm of one gradient as a whole, with the same bits on all ranks.
Next: `torch.nn.utils.clip_grad_norm_` adds them up, so its total is that of the whole model.

Code that asks for one norm usually asks for all, so the first question takes all of them in one collective.
An answer is given once, and only if the gradient cannot have been written to since.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Iterator, Sequence
from itertools import starmap

import torch
from torch import Tensor

from flatfsdp.contract.flat_shard import GradAt
from flatfsdp.engine.storage.master import MasterShard
from flatfsdp.engine.storage.shard_grad import ShardGrad, plain
from flatfsdp.engine.storage.unreduced import UNREDUCED, reduced_grad
from flatfsdp.optim.clip import identity_of_norm, norm_over, norms_of, pipeline_of, require_same_grid, widest
from flatfsdp.optim.piece_norms import InPieces, PieceNorms

_OfMaster = tuple[MasterShard, ShardGrad]
"""A gradient, and the shard that it is of."""


class NormsOverRanks:
    """Takes norms of one model's gradients over all ranks.

    Args:
        masters: all shards of the model, in the same order on all ranks.  They keep this object alive.
    """

    def __init__(self, masters: Iterable[MasterShard]) -> None:
        self._references: list[weakref.ref[MasterShard]] = []
        for number, master in enumerate(masters):
            self._references.append(weakref.ref(master))
            master.in_model.answers, master.in_model.number = self, number
        self._writes = 0
        self._answered = 0

    @property
    def _masters(self) -> list[MasterShard]:
        """The shards that are still there."""
        return [master for reference in self._references if (master := reference()) is not None]

    def norm(self, grad: ShardGrad, norm_type: float) -> Tensor:
        """Norm of the whole gradient that `grad` is a part of, or was computed from.

        0-dim, in FP32 at least, on the model's device.  Collective over all ranks of the model.

        Raises:
            RuntimeError: if some gradient in the model was not put there by the engine; for a stage of a
                pipeline.
            ValueError: if some units are spread over fewer ranks than others.
        """
        answer, grad.answer = grad.answer, None
        if answer is not None and answer[0] == (norm_type, grad._version, self._writes):
            self._answered += 1
            return answer[1]
        if any(each.stages.size > 1 for each in self._masters):
            raise RuntimeError(
                "a norm was asked of the gradients of one stage of a pipeline, and it is not the model's; "
                "use flatfsdp.parallel.clip_grad_norm_(all stages of this rank, max_norm)"
            )
        require_same_grid(each.grid for each in self._masters)
        master = self._references[grad.place.shard.number]()
        if master is None:
            raise RuntimeError("the model that this gradient is of is gone, and with it who has other parts")
        is_in_place = master.grad_attribute.of(master.parameters[grad.place.number]) is grad
        if self._answered == 1 or not is_in_place:
            # The other norms were not asked for the last time, or this is computed from a gradient.
            return self._norms([(master, grad)], norm_type)[0]
        present = list(self._present())
        for (_, each), norm in zip(present, self._norms(present, norm_type), strict=True):
            each.answer = (norm_type, each._version, self._writes), norm
        self._answered = 0
        # Its own is one of them.
        return self.norm(grad, norm_type)

    def forget(self) -> None:
        """Drops the answers: gradients may be written to unnoticed from now on."""
        self._writes += 1

    def share_nonfinite(self, found: Tensor) -> None:
        """Sets a count of non-finite values to the largest of all ranks.  Collective."""
        masters = self._masters
        largest = max((each.grid for each in masters), key=lambda grid: (grid.num_ranks, grid.tensor.size))
        stages = pipeline_of(None, (master.stages for master in masters))
        own = found.detach().to(masters[0].device)
        identity = identity_of_norm(master.unit for master in masters)
        found.copy_(norm_over([*largest.dimensions, stages], own, math.inf, identity))

    def _present(self) -> Iterator[_OfMaster]:
        """The gradients that are there, in the same order on all ranks."""
        for master in self._masters:
            if master.marks.is_on and not master.marks.were_zeroed:
                raise RuntimeError(f"a norm of gradients was asked for while {UNREDUCED}")
            for index, parameter in enumerate(master.parameters):
                grad = reduced_grad(parameter, master.grad_attribute)
                if grad is None:
                    continue
                if not isinstance(grad, ShardGrad) or grad.place != (master.in_model, index):
                    raise RuntimeError(
                        f"the gradient of {master.local_shard_name(index)} has been replaced by one that no "
                        "other rank knows; write into .grad (copy_, mul_), or compute the new one from it"
                    )
                yield master, grad

    def _norms(self, gradients: Sequence[_OfMaster], norm_type: float) -> list[Tensor]:
        """The norm of each gradient over all ranks, in the given order."""
        masters, device = [master for master, _ in gradients], gradients[0][0].device
        parts = [plain(grad) for _, grad in gradients]
        dtype = widest(parts)
        identity = identity_of_norm(master.unit for master in masters)
        # All units of a model have the same lanes.
        if masters[0].unit.policy.lanes is not None:
            of_pieces = PieceNorms(list(starmap(_in_pieces, gradients)), dtype, device, norm_type)
            return list(torch._foreach_norm(of_pieces.over_ranks(identity), norm_type))
        places = [(master.grid.partners, master.is_counted) for master in masters]
        return norms_of(parts, places, device, norm_type, identity)


def _in_pieces(master: MasterShard, grad: ShardGrad) -> InPieces:
    """The whole gradient that this is a part of, cut into pieces for its norm."""
    layout, number = master.layout, grad.place.number
    bounds = layout.bounds_of_slots[number] if master.is_divided else layout.bounds
    start = master.start + master.local_shards[number].start
    return InPieces(bounds, master.grid.shard, [GradAt(start, plain(grad))])
