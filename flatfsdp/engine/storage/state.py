"""State: what the objects of a model have in common, and what is true of each of its flat groups now.

    Shared <-- every unit of the model (`UnitMember`) <-- every group of the unit, with a `GroupState`

Nothing below a unit keeps a reference to `Shared`: a group asks its unit each time.  So one assignment to
`shared` replaces all that a unit had as a model by itself, when it joins a larger one.

`GroupState` is written by the objects that a group is made of.  Its `GroupFacts` are what an equal
microbatch of a later step leaves as well: `engine/replay` compares and keeps them, `FlatGroup.become` assigns
them.  Facts are relative, so that they hold in another step: "of this step", or "of the master's current
values".  Events and gradients are no facts; they are at the objects that wait for them or hand them over.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from enum import Enum
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from flatfsdp.byte_ledger import ByteLedger, Traffic, span
from flatfsdp.comm.checking.identity import Action, Identity, ModelIdentity
from flatfsdp.comm.checking.journal import launch
from flatfsdp.comm.grid import Grid
from flatfsdp.comm.ranks import Ranks
from flatfsdp.comm.streams import SideStream
from flatfsdp.fp8.step_scales import StepScales
from flatfsdp.microbatch import Microbatch
from flatfsdp.options import Policy


@dataclass(eq=False)
class Shared:
    """State of one model that all of its units share; each unit has its own until the model is first used.

    Attributes:
        device: device that the model computes and communicates on.
        microbatch: which microbatch this is.
        ledger: counter of bytes moved.
        scales: scales of FP8 layers at the beginning of the step, which a skipped step gets back.
        identity: what collectives of the model carry; None before it is used.
        checks: whether collectives carry it.
        reduces_every: whether each microbatch reduces its gradients; the last one of a step does anyway.
        gather_stream: stream that gathers parameters; missing before the model is used.
    """

    device: torch.device
    microbatch: Microbatch = field(default_factory=Microbatch)
    ledger: ByteLedger = field(default_factory=ByteLedger)
    scales: StepScales = field(default_factory=StepScales)
    identity: ModelIdentity | None = None
    checks: bool = True
    reduces_every: bool = False
    gather_stream: SideStream = field(init=False, repr=False)


@dataclass(eq=False)
class UnitMember:
    """A unit as its flat groups see it.

    Attributes:
        policy: settings that the user has chosen.
        grid: the ranks over which its parameters are sharded, replicated and split.
        shared: state of the model that the unit is in.
        prefix: prefix of the parameters' original names, such as "blocks.0."; set by the root.
        number: number of the unit in the model, the same on all ranks.
    """

    policy: Policy
    grid: Grid
    shared: Shared
    prefix: str = ""
    number: int = 0

    @property
    def name(self) -> str:
        """Name of the unit, for labels and messages."""
        return self.prefix.rstrip(".") or "root"

    def moving(self, label: str, kind: Traffic, nbytes: float) -> AbstractContextManager[object]:
        """Counts bytes that the unit moves; returns a context that shows them in a profile by this label."""
        self.shared.ledger.add(kind, nbytes)
        return span(label, self.name, self.shared.microbatch.index, int(nbytes))

    @contextmanager
    def sending(
        self, label: str, kind: Traffic, nbytes: float, ranks: Ranks, action: Action, collectives: int = 1
    ) -> Iterator[None]:
        """Context of one launch of collectives, which carries this purpose; counts bytes as `moving` does."""
        identity = self.identify(action)
        with self.moving(label, kind, nbytes), launch(ranks, identity, self.shared.device, collectives):
            yield

    def landed(self, group: Any, index: int | None) -> None:
        """Called when a gradient of this backward is in `main_grad`.

        Args:
            group: the `FlatGroup`, which is of this unit.
            index: index of the gradient's slot; None when all slots landed at once.
        """
        raise NotImplementedError

    @property
    def is_used(self) -> bool:
        """Whether the unit is in a model that has been used."""
        return self.shared.identity is not None

    @property
    def model(self) -> ModelIdentity | None:
        """Identity of the model; None before it is used, and if this unit's collectives are not checked."""
        is_checked = self.policy.debug.check_collectives and self.shared.checks
        return self.shared.identity if is_checked else None

    def identify(self, action: Action) -> Identity | None:
        """Identity that a collective of this unit carries; None where nothing is checked."""
        model, microbatch = self.model, self.shared.microbatch
        if model is None:
            return None
        return Identity(action, model, self.number, microbatch.steps_reduced, microbatch.index)


Version = tuple[int, int]
"""Version of a master shard; changes whenever its values may have changed."""


class ShardState(Enum):
    """State of a flat group's gathered buffer."""

    SHARDED = "sharded"
    GATHERING = "gathering"
    UNSHARDED = "unsharded"


class GroupFacts(NamedTuple):
    """What a microbatch finds in a group, or leaves; see `GroupState`."""

    shard: ShardState
    has_transposes: bool
    is_measured: bool
    is_scaled: bool
    is_cast: bool
    takes_part: bool
    written: tuple[bool, ...]
    used: frozenset[int]


_FLAGS = attrgetter("has_transposes", "is_measured", "is_scaled", "is_cast", "takes_part")


@dataclass(slots=True, eq=False)
class GroupState:
    """What is true of one flat group now.

    Whoever changes one of its `GroupFacts` raises `changes`, before or after.  What only users change, and
    the version of the master shard, is not counted: PyTorch counts it, or one has to look.

    Attributes:
        shard: whether the parameters are gathered.
        has_transposes: whether transposes of FP8 weights have memory.
        version: version of the master shard that the next three are about; see `of_version`.
        is_measured: whether the amaxes of FP8 weights are taken.
        is_scaled: whether the scales of FP8 weights are set.
        is_cast: whether the compute shard has the values.
        written: for each slot of `main_grad`, whether it holds gradients of this step; empty if none does.
        used: slots that have got a gradient on this rank in this step.
        takes_part: whether the group is reduced in this step.
        flags_changed: whether a parameter was frozen or unfrozen in this step.
        changes: number of changes so far.
        from_autograd: number of gradients that autograd has brought to the optimizer's parameters itself.
    """

    shard: ShardState = ShardState.SHARDED
    has_transposes: bool = False
    version: Version = (-1, -1)
    is_measured: bool = False
    is_scaled: bool = False
    is_cast: bool = False
    written: list[bool] = field(default_factory=list)
    used: set[int] = field(default_factory=set)
    takes_part: bool = False
    flags_changed: bool = False
    changes: int = 0
    from_autograd: int = 0

    def of_version(self, version: Version) -> GroupState:
        """Itself, without what was made of other values of the master shard than those of `version`."""
        if version != self.version:
            self.version = version
            self.is_measured = self.is_scaled = self.is_cast = False
        return self

    def end_step(self) -> None:
        """Forgets what is true of one step only; `main_grad` has dropped its gradients."""
        self.changes += 1
        self.takes_part = self.flags_changed = False
        self.used = set()

    def facts(self) -> GroupFacts:
        """The facts between two microbatches: nothing is under way, and what was gathered ahead is there."""
        # Each of a hundred groups is asked in a replayed microbatch: tuples are compared without any Python.
        shard = ShardState.UNSHARDED if self.shard is ShardState.GATHERING else self.shard
        return GroupFacts._make((shard, *_FLAGS(self), tuple(self.written), frozenset(self.used)))

    def take(self, facts: GroupFacts) -> None:
        """Takes these facts, for the master's version that this state is of."""
        self.changes += 1
        self.shard, self.has_transposes = facts.shard, facts.has_transposes
        self.is_measured, self.is_scaled, self.is_cast = facts.is_measured, facts.is_scaled, facts.is_cast
        self.written, self.used, self.takes_part = list(facts.written), set(facts.used), facts.takes_part
