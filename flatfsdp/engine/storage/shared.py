"""What the objects of one model have in common: `Shared` for all units, `UnitMember` for the groups of one.

    Shared <-- every unit of the model <-- every group of the unit

Nothing below a unit keeps a reference to `Shared`: a group asks its unit each time.  So one assignment to
`shared` replaces all that a unit had as a model by itself, when it joins a larger one.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from flatfsdp.byte_ledger import ByteLedger, Traffic, span
from flatfsdp.comm.checking.identity import Action, Identity, ModelIdentity
from flatfsdp.comm.grid import Grid
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
    """

    device: torch.device
    microbatch: Microbatch = field(default_factory=Microbatch)
    ledger: ByteLedger = field(default_factory=ByteLedger)
    scales: StepScales = field(default_factory=StepScales)
    identity: ModelIdentity | None = None
    checks: bool = True

    @cached_property
    def gather_stream(self) -> SideStream:
        """The stream that gathers parameters; only a model that is used needs one."""
        return SideStream(self.device)


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
