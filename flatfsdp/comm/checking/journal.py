"""Journals of launches that carry their purpose, so that ranks which do different things find out.

In:   an `Identity` for each gather and reduction of the engine.
Out:  the same launch, and with it an all-gather of one number a rank; RuntimeError if the numbers differ.
Next: `comm/collectives.py` has the collectives inside.

Without it, nothing notices that two collectives of equal size have met: ranks that run their layers in
different orders would train with a mix of two layers.

    gloo   the numbers travel first, and the host compares them before the payload starts; it waits for other
           ranks as long as `Identity.limit` says, and `reports.py` finds out which ranks did not come
    NCCL   the numbers travel in the same launch, straight into pinned CPU memory; the host looks there
           whenever it is in the engine anyway, so nothing waits for the device

With NCCL, collectives that have met have run by then, so the communicators are aborted before the error is
raised: no rank stays blocked in one, now or at exit.  A rank that waits for the device cannot look;
`watch.py` does that for it, and notices ranks that do not come.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions

from flatfsdp.comm.checking.identity import OF_LAYERS, Difference, Identity, ModelIdentity, compared, is_whole
from flatfsdp.comm.checking.reports import Launches, UnderWay, why_in_vain
from flatfsdp.comm.checking.watch import announce, watch
from flatfsdp.comm.collectives import all_gather_numbers, one_launch, uses_nccl
from flatfsdp.comm.device import indexed, on_device
from flatfsdp.comm.ranks import Ranks
from flatfsdp.torch_private import time_limit, timeout_of

ROWS = 1024
"""Largest number of NCCL launches in flight before the host waits for the device."""

SETTLING = 1.0
"""Seconds within which a number that has begun to arrive is whole.  Other processes on a GPU may take their
turn while half of one is written; after this time it counts as bytes of a payload."""

ABORT_SECONDS = 10.0
"""Seconds that the main thread waits for NCCL to end running collectives."""

ALARM_LASTS = timedelta(seconds=10)
"""Seconds during which a rank that stops tries, in the background, to tell others why."""


def launch(
    ranks: Ranks, identity: Identity | None, device: torch.device, collectives: int = 1
) -> AbstractContextManager[None]:
    """Context that makes the collectives inside, of one kind, one launch that carries `identity`.

    Args:
        ranks: ranks of all collectives inside.
        identity: purpose of the launch; None carries and checks nothing.
        device: device of the payload.
        collectives: number of collectives inside.

    Raises:
        RuntimeError: if another rank's launch has another purpose, or a rank does not come; with NCCL, raised
            some launches later.
    """
    if identity is None or _has_nobody_to_ask(ranks, device):
        return one_launch(ranks, device, collectives)
    return _journal_of(ranks, device).launch(identity, ranks)


def declare(ranks: Ranks, identity: Identity | None, device: torch.device) -> None:
    """Compares the purpose of the next collective in a launch before it: for broadcasts, sends, receives."""
    with launch(ranks, identity, device, collectives=0):
        pass


def launch_on_host(ranks: Ranks, identity: Identity, device: torch.device) -> AbstractContextManager[None]:
    """Checks a frequent exchange of layers: like `launch` with gloo, and not at all with NCCL.

    With gloo, payloads of different sizes that meet would end the process without a traceback.
    """
    if _has_nobody_to_ask(ranks, device) or uses_nccl(ranks, device):
        return nullcontext()
    return _journal_of(ranks, device).launch(identity, ranks)


def explained(ranks: Ranks, identity: Identity, device: torch.device) -> AbstractContextManager[None]:
    """Context in which failed sends and receives name the missing ranks with gloo; no effect with NCCL."""
    if _has_nobody_to_ask(ranks, device):
        return nullcontext()
    journal = _journal_of(ranks, device)
    return journal.explained(identity) if isinstance(journal, HostJournal) else nullcontext()


def _has_nobody_to_ask(ranks: Ranks, device: torch.device) -> bool:
    """Whether there are no other ranks, or only imagined ones (tensors on the meta device)."""
    return ranks.group is None or ranks.size == 1 or device.type == "meta"


def look(model: ModelIdentity, *, wait: bool = False) -> None:
    """Raises RuntimeError if a launch of this model has met another rank's with another purpose.

    Args:
        model: model whose launches are checked.
        wait: wait for all launches so far; otherwise those that have not arrived count as good.
    """
    for journal in _journals_of(model):
        journal.look(wait=wait)


def _journal_of(ranks: Ranks, device: torch.device) -> HostJournal | DeviceJournal:
    assert ranks.group is not None
    of_group = _journals.setdefault(ranks.group, {})
    if device.type not in of_group:
        first = ranks.first_communicator()
        if uses_nccl(ranks, device):
            assert first.group is not None
            launches = _launches.setdefault(first.group, Launches(first))
            of_group[device.type] = DeviceJournal(ranks, device, launches)
        elif first is not ranks:
            # The host waits for each launch, so launches over both communicators have one order, and a gather
            # over one that meets a reduction over the other is found, too.
            of_group[device.type] = _journal_of(first, device)
        else:
            of_group[device.type] = HostJournal(ranks, device)
    return of_group[device.type]


def _journals_of(model: ModelIdentity) -> list[HostJournal | DeviceJournal]:
    """Existing journals of a model's communicators."""
    groups = [ranks.group for ranks in model.communicators if ranks.group is not None]
    return list(dict.fromkeys(each for group in groups for each in _journals.get(group, {}).values()))


_journals: WeakKeyDictionary[dist.ProcessGroup, dict[str, HostJournal | DeviceJournal]] = WeakKeyDictionary()
"""Journals by communicator and kind of device; all models that share a communicator share its journal."""

_launches: WeakKeyDictionary[dist.ProcessGroup, Launches] = WeakKeyDictionary()
"""NCCL launches, by the first communicator of their ranks."""


class HostJournal:
    """Journal of the launches over one communicator, whose purposes are sent before the payload."""

    _ALARM = -1

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        self._ranks = ranks
        self._device = device
        self._made = 0
        self._model = ModelIdentity()
        self._limit: float | None = None
        self._stopped: str | None = None
        self._alarms: list[tuple[dist.Work, Tensor, Tensor]] = []

    def look(self, *, wait: bool) -> None:
        """Does nothing: a difference is raised at once."""

    @contextmanager
    def launch(self, identity: Identity, ranks: Ranks) -> Iterator[None]:
        """Context that makes the collectives inside one launch.

        Args:
            identity: purpose of the launch.
            ranks: ranks of these collectives, perhaps over the second communicator.
        """
        # A rank that has stopped sends, in place of the number, an alarm and the difference that it knows.
        own = torch.tensor([identity.number, 0, 0, 0, 0], device="cpu")
        everyones = own.new_empty(self._ranks.size, 5)
        self._made += 1
        if identity.limit is not None:
            self._limit = identity.limit
        if identity.model.units:
            self._model = identity.model
        with self._waiting(identity, self._ranks):
            all_gather_numbers(everyones.view(-1), own, self._ranks)
        rows = everyones.tolist()
        alarm = next((Difference(*row[1:]) for row in rows if row[0] == self._ALARM), None)
        difference = alarm or Difference.among([row[0] for row in rows], self._ranks)
        if difference is not None:
            # Ranks of other groups may be about to wait for this one.  Their next launch with it gets the
            # alarm as its answer.
            for journal in {_journal_of(ranks, self._device) for ranks in identity.model.data_parallel}:
                if isinstance(journal, HostJournal) and journal is not self:
                    journal.warn(difference)
            raise RuntimeError(difference.message(self._model))
        with self._waiting(identity, ranks):
            yield

    @contextmanager
    def _waiting(self, identity: Identity, ranks: Ranks) -> Iterator[None]:
        """Context in which collectives wait as long as `identity` says, and at most the group's timeout."""
        assert ranks.group is not None
        # Layers do not know the limit; their model has set it.
        limit = self._limit if identity.action in OF_LAYERS else identity.limit
        if (longest := timeout_of(ranks.group)) is not None:
            limit = min(math.inf if limit is None else limit, longest.total_seconds())
        with self.explained(identity, limit), time_limit(ranks.group, limit):
            yield

    @contextmanager
    def explained(self, identity: Identity, limit: float | None = None) -> Iterator[None]:
        """Context in which a failure to reach other ranks raises with a message that names them.

        Args:
            identity: purpose of the launch.
            limit: seconds to wait; None: as long as the process group allows.

        Raises:
            RuntimeError: naming the ranks that did not come; from then on, in every launch.
        """
        if self._stopped is not None:
            raise RuntimeError(self._stopped)
        begin = time.monotonic()
        try:
            yield
        except RuntimeError as error:
            if "gloo" not in str(error):
                raise
            waited = time.monotonic() - begin
            self._stopped = why_in_vain(self._ranks, self._made, identity, self._model, waited, limit, error)
            raise RuntimeError(self._stopped) from error

    def warn(self, difference: Difference) -> None:
        """Answers the other ranks' next launch over this communicator; does not wait for them.

        Args:
            difference: reason why this rank stops.
        """
        own = torch.tensor([self._ALARM, *difference], device="cpu")
        everyones = own.new_empty(self._ranks.size * 5)
        options = AllgatherOptions()
        options.timeout = ALARM_LASTS
        assert self._ranks.group is not None
        # This counts as the others' next launch: ranks find each other in the store by equal counts.
        self._made += 1
        work = self._ranks.group._allgather_base(everyones, own, options)
        # Kept until they are sent: gloo reads and writes the tensors in the background.
        self._alarms = [alarm for alarm in self._alarms if not alarm[0].is_completed()]
        self._alarms.append((work, everyones, own))


class DeviceJournal:
    """Journal of the launches over one communicator, whose purposes are sent with the payload.

    The row of a launch in CPU memory holds one number a rank, 0 until it arrives.

    Attributes:
        launches: launches in flight over all communicators of these ranks.
        stopped: reason why the communicators were aborted; None if they were not.
    """

    def __init__(self, ranks: Ranks, device: torch.device, launches: Launches) -> None:
        self._ranks = ranks
        self.launches = launches
        self._device = indexed(device)
        self._made = 0
        with torch.inference_mode(False), on_device(self._device):
            host = torch.zeros(ROWS, ranks.size, dtype=torch.int64, device="cpu", pin_memory=True)
            self._rows = on_gpu(host, self._device).unbind()
            # A rank's number is in its place of the row already, so the all-gather runs in place.
            self._own = [row[ranks.rank : ranks.rank + 1] for row in self._rows]
        self._numbers = host.numpy()
        self._bytes = [memoryview(row).cast("B") for row in self._numbers]
        self._under_way: deque[UnderWay] = deque()
        self.stopped: str | None = None
        watch(self)

    @contextmanager
    def launch(self, identity: Identity, ranks: Ranks) -> Iterator[None]:
        """Context that makes the collectives inside, over this journal's communicator, one launch."""
        # A row is used again after ROWS launches: by then the launch that had it must be over.
        self.look(wait=len(self._under_way) >= ROWS)
        index, number = self._made % ROWS, identity.number
        # Cleared before the launch, because 0 stands for what has not arrived.
        self._numbers[index] = 0
        self._numbers[index, self._ranks.rank] = number
        group = self._ranks.group
        assert group is not None
        group._start_coalescing(self._device)
        try:
            yield
            # In the same group call as the payload: the number meets what the payload meets.
            all_gather_numbers(self._rows[index], self._own[index], self._ranks)
        finally:
            # Also after an error: what follows would otherwise be collected, and never launched.
            group._end_coalescing(self._device)
        self._made += 1
        launch = self.launches.begin(number)
        alike = number.to_bytes(8, sys.byteorder) * self._ranks.size
        since = time.monotonic()
        self._under_way.append(UnderWay(index, launch, alike, identity.model, since, identity.limit))

    def look(self, *, wait: bool) -> None:
        """Drops launches that were equal on all ranks; raises RuntimeError for one that was not."""
        if wait and self._under_way:
            torch.cuda.synchronize(self._device)
        while self.stopped is None and self._under_way:
            # Launches over one communicator end in their order, so nothing behind the first one has arrived,
            # either.
            first = self._under_way[0]
            # Usually all numbers are there and equal; this finds out in a tenth of the time.
            if self._bytes[first.number].tobytes() != first.alike:
                difference = self._difference_in(first, is_over=wait)
                if difference is not None:
                    self.stop(difference, first.model)
                    break
                if not self._has_arrived(first):
                    break
            self._under_way.popleft()
            self.launches.end(first.launch)
        if self.stopped is not None:
            raise RuntimeError(self.stopped)

    def difference(self) -> tuple[Difference, ModelIdentity] | None:
        """The difference that `look` would raise, and its model; callable from any thread."""
        for row in tuple(self._under_way):
            difference = self._difference_in(row, is_over=False)
            if difference is not None:
                return difference, row.model
        return None

    def late(self, seconds: float) -> UnderWay | None:
        """The first launch that has not ended, if it is older than `seconds`; callable from any thread."""
        for row in tuple(self._under_way):
            if not self._has_arrived(row):
                return row if time.monotonic() - row.since > seconds else None
        return None

    def _has_arrived(self, row: UnderWay) -> bool:
        return bool(self._numbers[row.number].all())

    def _difference_in(self, row: UnderWay, *, is_over: bool) -> Difference | None:
        """Two ranks whose purposes differ, as far as the numbers have arrived.

        Args:
            row: the launch to look at.
            is_over: missing numbers will not come any more.
        """
        numbers = self._numbers[row.number]
        known = numbers[numbers != 0]
        is_alike = compared(int(known.min())) == compared(int(known.max()))
        if is_alike and not (is_over and len(known) < len(numbers)):
            return None
        # NCCL writes a number byte by byte, so part of one looks like another number.
        deadline = time.monotonic() + SETTLING
        while not all(map(is_whole, numbers[numbers != 0].tolist())) and time.monotonic() < deadline:
            time.sleep(0.001)
        return Difference.among(numbers.tolist(), self._ranks, is_over=is_over)

    def stop(self, why: Difference | str, model: ModelIdentity) -> None:
        """Aborts all communicators of the model, so that nothing waits in one, and tells ranks of others.

        Args:
            why: difference that this rank has seen, or another rank's message.
            model: model that stops.
        """
        words = why if isinstance(why, str) else f"{why.message(model)} {_TOO_LATE}"
        # Set the reason first: the main thread goes on, and looks, when the first communicator ends.
        for journal in {self, *_journals_of(model)}:
            if isinstance(journal, DeviceJournal):
                journal.stopped = journal.stopped or words
        try:
            # Announce a missing rank, too: it may still come, and would wait for those that have aborted.
            announce(model, words)
        finally:
            abort({self._ranks, *model.communicators}, self._device)


_TOO_LATE = (
    "What was computed since then is wrong, and the process groups were aborted; start again from the last "
    "checkpoint."
)


def abort(communicators: Iterable[Ranks], device: torch.device) -> None:
    """Aborts the running NCCL collectives over these ranks; their process groups are unusable afterwards.

    Aborts all communicators at once: NCCL frees memory, and CUDA then waits for all kernels, including those
    of other communicators.
    """
    aborts = [ranks.group._get_backend(device).abort for ranks in communicators if ranks.group is not None]
    threads = [threading.Thread(target=each, daemon=True) for each in aborts]
    for thread in threads:
        thread.start()
    # One deadline for all, because this rank has an error to raise, and NCCL may never return.
    deadline = time.monotonic() + ABORT_SECONDS
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


def on_gpu(pinned: Tensor, device: torch.device) -> Tensor:
    """Maps pinned CPU memory, int64 and contiguous, to a tensor on `device` without a copy.

    NCCL reads and writes there, so that the host sees what arrives without waiting for the device.

    Raises:
        RuntimeError: if the device cannot address the memory.
    """
    alias = torch.as_tensor(_CudaArray(pinned), device=device)
    if alias.data_ptr() != pinned.data_ptr():
        raise RuntimeError(
            f"pinned CPU memory is not addressable on {device}; pass debug=Debug(check_collectives=False)"
        )
    return alias


class _CudaArray:
    """Object with Numba's array interface, from which PyTorch makes a tensor; the driver tells the device."""

    def __init__(self, pinned: Tensor) -> None:
        # Kept, as the tensor that PyTorch makes from this object holds the object, and not the memory.
        self._pinned = pinned
        self.__cuda_array_interface__ = {
            "shape": tuple(pinned.shape),
            "typestr": "<i8",
            "data": (pinned.data_ptr(), False),
            "strides": None,
            "version": 3,
        }
