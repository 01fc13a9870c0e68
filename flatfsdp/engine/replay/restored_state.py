"""`RestoredState`: what a microbatch leaves behind in the engine, restored after each of its replays.

In:   the engine before and after a microbatch was recorded; nothing has run by then.
Out:  after a replay, the engine as an eager microbatch would have left it.
Next: `recording.py` has the kernels themselves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

from flatfsdp.engine.replay.preconditions import facts_of
from flatfsdp.engine.step.reduce import Reduced
from flatfsdp.engine.step.root import Root
from flatfsdp.fp8.delayed_scaling import Scaling
from flatfsdp.fp8.region import current_region


class RestoredState:
    """What one microbatch changes in the engine, besides what its kernels write.

    Attributes:
        reduced: gradients that it reduces.
        scalings: FP8 scales that it updates.
    """

    def __init__(self, root: Root) -> None:
        self._root = root
        self.reduced: list[Reduced] = []

    @contextmanager
    def noted(self, scalings: Sequence[Scaling]) -> Iterator[None]:
        """Context of the recording; notes what differs after it.

        Args:
            scalings: FP8 scales of the whole model.
        """
        root, ledger, scales = self._root, self._root.shared.ledger, self._root.shared.scales
        found, held = facts_of(root), set(scales.held)
        nbytes, calls = Counter(ledger.bytes), Counter(ledger.calls)
        lacking = [scaling for scaling in scalings if not scaling.has_scales]
        region = current_region()
        noting: AbstractContextManager[list[Scaling]] = nullcontext([]) if region is None else region.noted()
        with noting as self._used_in_region:
            yield
        of_groups = zip(root.groups, facts_of(root), found, strict=True)
        self._changed = [(group, left) for group, left, earlier in of_groups if left != earlier]
        # Sums over ranks, in fixed memory or not there, and scales that wait for the end of the step.
        summed = root.groups if root.reduces_early else ()
        self._sums = [(group, each, each.so_far) for group in summed for each in group.sums]
        self._held = {scaling: group for scaling, group in scales.held.items() if scaling not in held}
        self.scalings: list[Scaling] = scales.noted
        self._first_scaled = [scaling for scaling in lacking if scaling.has_scales]
        self._nbytes, self._calls = ledger.bytes - nbytes, ledger.calls - calls

    def restore(self) -> None:
        """Changes the engine as an eager microbatch would have done."""
        root, ledger, scales = self._root, self._root.shared.ledger, self._root.shared.scales
        if (region := current_region()) is not None:
            region.outermost.has_layers = True
            for scaling in self._used_in_region:
                region.use(scaling)
        # A skipped step may have taken away the scales of a first update, which this replay has made again.
        for scaling in self._first_scaled:
            scaling.has_scales = True
        # A replay moves as many bytes.
        ledger.bytes.update(self._nbytes)
        ledger.calls.update(self._calls)
        for group, left in self._changed:
            group.become(left)
        for group, each, so_far in self._sums:
            if each.so_far is not so_far:
                each.so_far = so_far
                group.state.changes += 1
        if root.microbatch.is_last:
            # Updated by the graph.
            scales.held.clear()
        scales.held.update(self._held)
        # Its copy says that it takes no part in the next step; this one counts as reduced because of it.
        for group, _, _ in self.reduced:
            group.join_step()
        if self.reduced:
            root.publish(self.reduced)
        root.end_microbatch()
