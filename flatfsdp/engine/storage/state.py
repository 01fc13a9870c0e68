"""`GroupState`: what the host knows of a flat group that changes from one microbatch to the next.

In:   writes of the objects that a group is made of, each of which has the group's state.
Out:  `GroupFacts`, which an equal microbatch of a later step leaves as well.
Next: `group.py` assigns them (`FlatGroup.become`); `engine/replay` compares and keeps them.

Facts are relative, so that they hold in another step: "of this step", or "of the master's current values".
Events and gradients are not facts; they are at the objects that wait for them or hand them over.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from operator import attrgetter
from typing import NamedTuple

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

    @property
    def is_of_a_step(self) -> bool:
        """Whether there is something that the end of a step has to forget."""
        return self.takes_part or self.flags_changed or bool(self.written or self.used)

    def end_step(self) -> None:
        """Forgets what is true of one step only; `main_grad` has dropped its gradients."""
        self.changes += 1
        self.takes_part = self.flags_changed = False
        self.used = set()

    def facts(self) -> GroupFacts:
        """The facts between two microbatches: nothing is under way, and what was gathered ahead is there."""
        # Each of a hundred groups is asked in a replayed microbatch: tuples are compared without any Python.
        shard = ShardState.UNSHARDED if self.shard is ShardState.GATHERING else self.shard
        return GroupFacts(shard, *_FLAGS(self), tuple(self.written), frozenset(self.used))

    def take(self, facts: GroupFacts) -> None:
        """Takes these facts, for the master's version that this state is of."""
        self.changes += 1
        self.shard, self.has_transposes = facts.shard, facts.has_transposes
        self.is_measured, self.is_scaled, self.is_cast = facts.is_measured, facts.is_scaled, facts.is_cast
        self.written, self.used, self.takes_part = list(facts.written), set(facts.used), facts.takes_part
