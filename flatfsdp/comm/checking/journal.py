"""Launches that carry what they are for, so that ranks which do different things hear of it.

In:   an `Identity` for everything that the engine gathers or reduces.
Out:  the same launch, and with it an all-gather of one number a rank; RuntimeError if the numbers differ.
Next: `comm/collectives.py` has the collectives inside.

Without it, two collectives of equal size that meet are computed without a word: ranks that run their layers
in another order train with a mix of two layers.

    gloo   the numbers travel first, and the host compares them before the payload starts; it waits for other
           ranks as long as `Identity.limit` says, and `absence.py` finds out who did not come
    NCCL   they travel in the same launch, straight into pinned host memory, where the host looks whenever it
           is in the engine anyway; nothing waits for the device

With NCCL the collectives that met have run by then, so the communicators are aborted before the error is
raised: no rank is left waiting in one, now or at exit.  A rank that waits for the device cannot look;
`watch.py` does that for it, and notices ranks that do not come.
"""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions

from flatfsdp.comm.checking.abort import abort
from flatfsdp.comm.checking.absence import why_in_vain
from flatfsdp.comm.checking.identity import OF_LAYERS, Difference, Identity, ModelIdentity, compared
from flatfsdp.comm.checking.launches import Launches, UnderWay
from flatfsdp.comm.checking.pinned import on_gpu
from flatfsdp.comm.checking.watch import announce, watch
from flatfsdp.comm.collectives import all_gather_numbers, one_launch, uses_nccl
from flatfsdp.comm.device import indexed, on_device
from flatfsdp.comm.ranks import Ranks
from flatfsdp.torch_private import time_limit, timeout_of

ROWS = 1024
"""Launches with NCCL that may be under way before the host waits for the device."""

SETTLING = 0.002
"""Seconds in which a number that has begun to arrive is there."""

ALARM_LASTS = timedelta(seconds=10)
"""How long a rank that stops tries, in the background, to tell others why."""


def launch(
    ranks: Ranks, identity: Identity | None, device: torch.device, collectives: int = 1
) -> AbstractContextManager[None]:
    """Collectives of one kind inside are one launch, which carries `identity`.

    Args:
        ranks: of all collectives inside.
        identity: None carries nothing.
        device: where the payload is.
        collectives: how many there are.

    Raises:
        RuntimeError: if another rank's launch is for something else, or a rank does not come; with NCCL, some
            launches later.
    """
    if identity is None or _has_nobody_to_ask(ranks, device):
        return one_launch(ranks, device, collectives)
    return _journal_of(ranks, device).launch(identity, ranks)


def declare(ranks: Ranks, identity: Identity | None, device: torch.device) -> None:
    """Says what the next collective is for in a launch before it: for broadcasts, sends and receives."""
    with launch(ranks, identity, device, collectives=0):
        pass


def launch_on_host(ranks: Ranks, identity: Identity, device: torch.device) -> AbstractContextManager[None]:
    """Checks a frequent exchange of layers: like `launch` with gloo, and not at all with NCCL.

    Payloads of different sizes that meet end the process with gloo, without a traceback.
    """
    if _has_nobody_to_ask(ranks, device) or uses_nccl(ranks, device):
        return nullcontext()
    return _journal_of(ranks, device).launch(identity, ranks)


def explained(ranks: Ranks, identity: Identity, device: torch.device) -> AbstractContextManager[None]:
    """Sends and receives inside that fail with gloo say who is missing; nothing with NCCL."""
    if _has_nobody_to_ask(ranks, device):
        return nullcontext()
    journal = _journal_of(ranks, device)
    return journal.explained(identity) if isinstance(journal, HostJournal) else nullcontext()


def _has_nobody_to_ask(ranks: Ranks, device: torch.device) -> bool:
    """Whether there are no other ranks, or only imagined ones, with tensors on the meta device."""
    return ranks.group is None or ranks.size == 1 or device.type == "meta"


def look(model: ModelIdentity, *, wait: bool = False) -> None:
    """Raises RuntimeError if a launch of this model has met another rank's for something else.

    Args:
        wait: for all launches so far; otherwise what has not arrived counts as good.
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
            # The host waits for each launch, so all of them have one order: a gather that meets a reduction
            # over the other communicator differs, too.
            of_group[device.type] = _journal_of(first, device)
        else:
            of_group[device.type] = HostJournal(ranks, device)
    return of_group[device.type]


def _journals_of(model: ModelIdentity) -> list[HostJournal | DeviceJournal]:
    """The journals that there are of a model's communicators."""
    groups = [ranks.group for ranks in model.communicators if ranks.group is not None]
    return list(dict.fromkeys(each for group in groups for each in _journals.get(group, {}).values()))


_journals: WeakKeyDictionary[dist.ProcessGroup, dict[str, HostJournal | DeviceJournal]] = WeakKeyDictionary()
"""By communicator and kind of device: the launches of all models that share a communicator meet there."""

_launches: WeakKeyDictionary[dist.ProcessGroup, Launches] = WeakKeyDictionary()
"""With NCCL, by the first communicator of some ranks."""


class HostJournal:
    """What the launches over one communicator are for, sent before the payload."""

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
        """Nothing: a difference is raised at once."""

    @contextmanager
    def launch(self, identity: Identity, ranks: Ranks) -> Iterator[None]:
        """Collectives inside are one launch.

        Args:
            ranks: of these collectives; they may be over the second communicator.
        """
        # In place of the number, a rank that has stopped sends an alarm and the difference that it knows of.
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
        difference = _alarm_in(rows) or Difference.among([row[0] for row in rows], self._ranks)
        if difference is not None:
            for journal in {_journal_of(ranks, self._device) for ranks in identity.model.data_parallel}:
                if isinstance(journal, HostJournal) and journal is not self:
                    journal.warn(difference)
            raise RuntimeError(difference.message(self._model))
        with self._waiting(identity, ranks):
            yield

    @contextmanager
    def _waiting(self, identity: Identity, ranks: Ranks) -> Iterator[None]:
        """Collectives inside wait as long as `identity` says, and no longer than the process group has it."""
        assert ranks.group is not None
        # Layers do not know how long; the model that they are in has said so.
        limit = self._limit if identity.action in OF_LAYERS else identity.limit
        if (longest := timeout_of(ranks.group)) is not None:
            limit = min(math.inf if limit is None else limit, longest.total_seconds())
        with self.explained(identity, limit), time_limit(ranks.group, limit):
            yield

    @contextmanager
    def explained(self, identity: Identity, limit: float | None = None) -> Iterator[None]:
        """What is sent inside over these ranks, and fails, raises with words.

        Args:
            limit: seconds that it waits; None: as long as the process group has it.

        Raises:
            RuntimeError: with the ranks that did not come; from then on, always.
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
            difference: why this rank stops.
        """
        own = torch.tensor([self._ALARM, *difference], device="cpu")
        everyones = own.new_empty(self._ranks.size * 5)
        options = AllgatherOptions()
        options.timeout = ALARM_LASTS
        assert self._ranks.group is not None
        # It is the others' next launch: all go on counting alike, by which they find each other in the store.
        self._made += 1
        work = self._ranks.group._allgather_base(everyones, own, options)
        self._alarms = [alarm for alarm in self._alarms if not alarm[0].is_completed()]
        self._alarms.append((work, everyones, own))


def _alarm_in(rows: Sequence[Sequence[int]]) -> Difference | None:
    return next((Difference(*row[1:]) for row in rows if row[0] == HostJournal._ALARM), None)


class DeviceJournal:
    """What the launches over one communicator are for, sent with the payload.

    The row of a launch in host memory holds one number a rank, 0 until it arrives.

    Attributes:
        launches: those under way over all communicators of these ranks.
        stopped: why the communicators were aborted; None if they were not.
    """

    def __init__(self, ranks: Ranks, device: torch.device, launches: Launches) -> None:
        self._ranks = ranks
        self.launches = launches
        self._device = indexed(device)
        self._made = 0
        with torch.inference_mode(False), on_device(self._device):
            host = torch.zeros(ROWS, ranks.size, dtype=torch.int64, device="cpu", pin_memory=True)
            self._rows = on_gpu(host, self._device).unbind()
            self._own = [row[ranks.rank : ranks.rank + 1] for row in self._rows]
        self._numbers = host.numpy()
        self._bytes = [memoryview(row).cast("B") for row in self._numbers]
        self._under_way: deque[UnderWay] = deque()
        self.stopped: str | None = None
        watch(self)

    @contextmanager
    def launch(self, identity: Identity, ranks: Ranks) -> Iterator[None]:
        """Collectives inside, over the communicator of this journal, are one launch."""
        self.look(wait=len(self._under_way) >= ROWS)
        index, number = self._made % ROWS, identity.number
        self._numbers[index] = 0
        self._numbers[index, self._ranks.rank] = number
        group = self._ranks.group
        assert group is not None
        group._start_coalescing(self._device)
        try:
            yield
            all_gather_numbers(self._rows[index], self._own[index], self._ranks)
        finally:
            group._end_coalescing(self._device)
        self._made += 1
        launch = self.launches.begin(number)
        alike = number.to_bytes(8, sys.byteorder) * self._ranks.size
        since = time.monotonic()
        self._under_way.append(UnderWay(index, launch, alike, identity.model, since, identity.limit))

    def look(self, *, wait: bool) -> None:
        """Forgets launches that were alike on all ranks; raises RuntimeError for one that was not."""
        if wait and self._under_way:
            torch.cuda.synchronize(self._device)
        while self.stopped is None and self._under_way:
            first = self._under_way[0]
            # All numbers are there, and the same: most often, and found out in a tenth of the time.
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
        """What `look` would raise, and of which model; for any thread."""
        for row in tuple(self._under_way):
            difference = self._difference_in(row, is_over=False)
            if difference is not None:
                return difference, row.model
        return None

    def late(self, seconds: float) -> UnderWay | None:
        """The first launch that has not ended, if it has been under way for longer; for any thread."""
        for row in tuple(self._under_way):
            if not self._has_arrived(row):
                return row if time.monotonic() - row.since > seconds else None
        return None

    def _has_arrived(self, row: UnderWay) -> bool:
        return bool(self._numbers[row.number].all())

    def _difference_in(self, row: UnderWay, *, is_over: bool) -> Difference | None:
        """Two ranks that do not do the same, if it is known.

        Args:
            is_over: a number that is not there will not come any more.
        """
        numbers = self._numbers[row.number]
        known = numbers[numbers != 0]
        is_alike = compared(int(known.min())) == compared(int(known.max()))
        if is_alike and not (is_over and len(known) < len(numbers)):
            return None
        # NCCL writes a number byte by byte: what is only half there has changed a moment later.
        time.sleep(SETTLING)
        return Difference.among(numbers.tolist(), self._ranks, is_over=is_over)

    def stop(self, why: Difference | str, model: ModelIdentity) -> None:
        """Aborts all communicators of the model, so that nobody waits in one, and tells ranks of others.

        Args:
            why: what this rank has seen, or the words of another one.
        """
        words = why if isinstance(why, str) else f"{why.message(model)} {_TOO_LATE}"
        # First the reason: the main thread goes on, and looks, with the first communicator that ends.
        for journal in {self, *_journals_of(model)}:
            if isinstance(journal, DeviceJournal):
                journal.stopped = journal.stopped or words
        try:
            # Also that a rank has not come: it may still, and would wait for those that have aborted.
            announce(model, words)
        finally:
            abort({self._ranks, *model.communicators}, self._device)


_TOO_LATE = (
    "What was computed since then is wrong, and the process groups were aborted; start again from the last "
    "checkpoint."
)
