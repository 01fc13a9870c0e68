"""Programs that ranks run together, and what they have come to."""

from __future__ import annotations

from collections.abc import Sequence

from tests.support.faults.ranks.processes import Ending, Verdict, endings, judged
from tests.support.faults.ranks.program import Operation, Setup, losses_of, run
from tests.support.faults.ranks.reference import reference


def tried(
    setups: Sequence[Setup], programs: Sequence[list[Operation]], odd: int
) -> tuple[list[Ending], Verdict]:
    """How ranks end that run these programs, and what that is worth.

    Args:
        setups: of each rank; those that differ may not finish.
        odd: the rank that does something else.
    """
    found = endings(len(programs), _run_own, setups, programs)
    if any(setup != setups[0] for setup in setups):
        return found, judged(found, odd)
    return found, judged(found, odd, reference(setups[0], programs), list(map(losses_of, programs)))


def _run_own(
    rank: int, setups: Sequence[Setup], programs: Sequence[list[Operation]], losses: list[float]
) -> None:
    run(rank, setups[rank], programs[rank], losses)
