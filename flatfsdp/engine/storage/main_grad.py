"""`MainGrad`: gradients of one group, added up over microbatches where reduce-scatter reads them.

In:   gradients as they land: by a hook (`backward_concat.py`), or by layers (`contract/main_grad.py`).
Out:  the flat buffer, full, for `engine/step/reduce.py`.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from flatfsdp.contract.attribute import OfThisProcess
from flatfsdp.contract.main_grad import CLAIM_MAIN_GRAD, GET_MAIN_GRAD, IS_FSDP_PARAM, MAIN_GRAD
from flatfsdp.engine.storage.state import GroupState, UnitMember
from flatfsdp.flat.layout import FlatLayout
from flatfsdp.kernels.grad.accumulate import accumulate, bytes_moved
from flatfsdp.kernels.grad.accumulate_many import DTYPES, accumulate_many

logger = logging.getLogger(__name__)


SMALL = 1 << 16
"""Gradients of at most this many elements wait for others of their unit, so that one launch adds all of them:
separate launches would cost more than the bytes do.  Norms and biases are of this size."""


FEW = 2
"""Up to this many waiting gradients are added one by one, which costs the host less than one joint launch."""


def dtype_of_buffer(unit: UnitMember) -> torch.dtype:
    """Dtype of the unit's `main_grad`: that of the sum over microbatches, if they are added up there.

    If each is sent at once, its gradient is rounded to bf16 where it is computed, rather than on its way.
    """
    precision = unit.policy.precision
    # With lanes a rank's own gradient goes into the sum as well, and may be of several microbatches.
    is_sent_at_once = unit.shared.reduces_every and unit.policy.lanes is None
    is_wide = precision.accumulate is torch.float32 and precision.reduce is torch.bfloat16
    return precision.reduce if is_sent_at_once and is_wide else precision.accumulate


class MainGrad:
    """Accumulates gradients of one group over microbatches in the flat buffer that reduce-scatter reads.

    The buffer appears when the first gradient of a step lands.  The first write to a slot copies, later ones
    add, so nothing is zeroed except the alignment gaps; each microbatch is one add, in order.

    Args:
        layout: places of the parameters.
        unit: the unit, whose shards the buffer is padded for.
        state: facts about the group, of which `written` and `used` are written here.

    Attributes:
        tensor: the buffer; None while there is none.
        stays: whether the buffer is kept for good, see `stay`.
    """

    def __init__(self, layout: FlatLayout, unit: UnitMember, state: GroupState) -> None:
        self._layout = layout
        # Parameters have the buffer's methods, and graphs in C++ keep parameters: a way back from here to
        # those graphs would be a circle that no garbage collection sees.
        self._unit: UnitMember = weakref.proxy(unit)
        self._state = state
        num_shards = unit.grid.shard.size
        self._numel = layout.padded_numel(num_shards)
        self._gaps = layout.gaps(num_shards)
        self._waiting: dict[int, Tensor] = {}
        self.stays = self._is_lent = False
        # The buffer and its views that are there while nothing is accumulated.
        self._at_rest: tuple[Tensor | None, list[Tensor], list[Tensor]] = (None, [], [])
        self.tensor: Tensor | None = None
        self._views, self._pack_views = self._at_rest[1:]
        self._exposed: Sequence[Tensor] = ()

    @property
    def holds_gradients(self) -> bool:
        """Whether a gradient has landed since the buffer was last handed over."""
        return bool(self._state.written or self._waiting)

    def stay(self) -> None:
        """Keeps the buffer for good, at one address."""
        self.stays = True
        if self.tensor is None:
            self._allocate()
        self._at_rest = self.tensor, self._views, self._pack_views

    def expose(self, parameters: Sequence[Tensor]) -> None:
        """Gives each parameter `main_grad` (None while there is no buffer), and the two methods below.

        Transformer Engine's own layers call `get_main_grad` on parameters with `__fsdp_param__`.
        """
        self._exposed = parameters
        for index, parameter in enumerate(parameters):
            IS_FSDP_PARAM.leave(parameter, True)
            GET_MAIN_GRAD.leave(parameter, OfThisProcess(self.get, index))
            CLAIM_MAIN_GRAD.leave(parameter, OfThisProcess(self.claim, index))
        self.show()

    def expose_packs(self, packs: Sequence[Tensor]) -> None:
        """Lets layers write the gradient of each pack: a pack is no parameter, and has no `main_grad`."""
        for index, pack in enumerate(packs):
            CLAIM_MAIN_GRAD.leave(pack, OfThisProcess(self.claim_pack, index))

    def get(self, index: int) -> Tensor:
        """View of slot `index` to add to: zero if nothing has landed there in this step."""
        view, is_first = self.claim(index)
        return view.zero_() if is_first else view

    def claim(self, index: int) -> tuple[Tensor, bool]:
        """View of slot `index` for the next writer, and whether nothing has landed there in this step.

        If nothing has, the contents are undefined and must be overwritten; otherwise the writer adds to them.
        """
        if index in self._waiting:
            # What waits came first; sums of floats depend on the order.
            self.flush()
        return self._claim(index)

    def claim_pack(self, index: int) -> tuple[Tensor, bool]:
        """View of pack `index`, and whether nothing has landed in any of its slots in this step.

        If a part that was used by itself has a gradient already, the other parts are zero.
        """
        slots = self._layout.packs[index].slots
        if not self._waiting.keys().isdisjoint(slots):
            self.flush()
        parts = [self._claim(slot) for slot in slots]
        is_first = all(is_empty for _, is_empty in parts)
        for view, is_empty in parts:
            if is_empty and not is_first:
                # The layer adds to the whole pack, and the contents of this part are undefined.
                view.zero_()
        return self._pack_views[index], is_first

    def _claim(self, index: int) -> tuple[Tensor, bool]:
        view, state = self.open()[index], self._state
        is_first = not state.written[index]
        state.written[index] = True
        state.used.add(index)
        return view, is_first

    def land(self, index: int, grad: Tensor) -> None:
        """Adds one parameter's gradient of one microbatch; small ones are added at the next `flush`.

        Raises:
            TypeError: if it is sparse.
        """
        if grad.layout is not torch.strided:
            raise TypeError(
                f"parameter {self._layout.slots[index].name} got a {grad.layout} gradient; flat buffers are "
                "dense, so build the layer without sparse gradients (nn.Embedding(sparse=False))"
            )
        if index in self._waiting:
            # One gradient a slot can wait, and the earlier one is added first.
            self.flush()
        is_small = 0 < grad.numel() <= SMALL and grad.dtype in DTYPES and grad.is_contiguous()
        if is_small and dtype_of_buffer(self._unit) == torch.float32:
            # For others of its unit; see `SMALL`.
            self._waiting[index] = grad
            return
        view, is_first = self._claim(index)
        self._accumulate(view, grad, first=is_first)

    def flush(self) -> None:
        """Adds the waiting gradients: at the end of a backward, and before the buffer is read."""
        waiting, self._waiting = self._waiting, {}
        if len(waiting) <= FEW:
            for index, grad in waiting.items():
                view, is_first = self._claim(index)
                self._accumulate(view, grad, first=is_first)
            return
        grads, views, written = list(waiting.values()), self.open(), self._state.written
        targets, first = [views[index] for index in waiting], [not written[index] for index in waiting]
        for index in waiting:
            written[index] = True
        self._state.used.update(waiting)
        accumulate_many(targets, grads, first)
        moved = (bytes_moved(*each[:2], first=each[2]) for each in zip(targets, grads, first, strict=True))
        self._unit.shared.ledger.add("accumulate", sum(moved))

    def land_flat(self, grad: Tensor, used: Iterable[int]) -> None:
        """Adds the padded gradient of one microbatch, which autograd has just concatenated.

        Args:
            grad: the gradient.
            used: slots whose parameters had one; autograd has made zeros for the others.
        """
        self.flush()
        # autograd read every view's gradient and wrote the flat one.
        self._unit.shared.ledger.add("concat", 2 * grad.numel() * grad.element_size())
        self.open()
        state = self._state
        if not any(state.written) or all(state.written):
            assert self.tensor is not None
            self._accumulate(self.tensor, grad, first=not any(state.written))
            state.written = [True] * len(state.written)
            state.used.update(used)
            return
        # `land` takes all slots for used, and autograd has made zeros for some.
        before = {*state.used, *used}
        for index, part in enumerate(self._layout.views(grad)):
            self.land(index, part)
        self.flush()
        state.used = before

    def take(self) -> Tensor:
        """Hands the buffer over for reduction; slots without a gradient in this step are zero."""
        self.flush()
        views = self.open()
        for view, written in zip(views, self._state.written, strict=True):
            if not written:
                # Reduce-scatter reads the whole buffer.
                view.zero_()
        tensor = self.tensor
        assert tensor is not None
        self.drop()
        self._is_lent = self.stays
        return tensor

    def returned(self) -> None:
        """Notes that the reduction that was handed the buffer has ended, for later launches."""
        self._is_lent = False

    def end_backward(self) -> None:
        """Settles what has landed."""
        if self._state.takes_part:
            # Small gradients wait for each other, but not for those of the next microbatch.
            self.flush()
        elif self.holds_gradients:
            # A layer wrote the gradient of a parameter that was frozen after the forward.
            self.drop()

    def drop(self) -> None:
        """Drops the gradients, and the buffer unless it stays."""
        self._state.changes += 1
        self.tensor, self._views, self._pack_views = self._at_rest
        self._state.written, self._waiting = [], {}
        # Now that nothing is written, it takes `main_grad` away from the parameters.
        self.show()

    def end_step(self) -> None:
        """Drops what a step has left behind, so that the next one does not add to it."""
        if any(self._state.written):
            logger.warning(
                "dropped gradients of a step that was never reduced (its last backward failed, or was "
                "not marked as the last one)"
            )
        if self.holds_gradients:
            self.drop()
        self._is_lent = False

    def open(self) -> list[Tensor]:
        """Views of the slots; something is about to land."""
        self._state.changes += 1
        if not self._state.written:
            # A nested backward may bring more while a reduction still reads the buffer that stays.
            if self.tensor is None or self._is_lent:
                self._allocate()
            self._state.written = [False] * len(self._views)
            self.show()
        return self._views

    def _allocate(self) -> None:
        self._state.changes += 1
        self.tensor = torch.empty(
            self._numel, dtype=dtype_of_buffer(self._unit), device=self._unit.shared.device
        )
        if self._unit.policy.debug.poison_on_free:
            self.tensor.fill_(torch.nan)
        # Nothing ever lands in the gaps, and they are reduced with the rest.
        for start, stop in self._gaps:
            self.tensor[start:stop].zero_()
        self._views = self._layout.views(self.tensor)
        self._pack_views = self._layout.pack_views(self.tensor)

    def show(self) -> None:
        """Gives the exposed parameters their `main_grad`, once gradients have landed."""
        for index, parameter in enumerate(self._exposed):
            MAIN_GRAD.leave(parameter, self._views[index] if self._state.written else None)

    def _accumulate(self, target: Tensor, grad: Tensor, *, first: bool) -> None:
        accumulate(target, grad, first=first)
        self._unit.shared.ledger.add("accumulate", bytes_moved(target, grad, first=first))
