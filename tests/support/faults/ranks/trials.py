"""Programs that ranks run together, and what they have come to."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tests.support.faults.ranks.processes import Ending, Started, Verdict, judged
from tests.support.faults.ranks.program import Operation, Setup, losses_of, run
from tests.support.faults.ranks.reference import reference

Result = tuple[list[Ending], Verdict]
"""How ranks end, and what that is worth."""


def begun(setups: Sequence[Setup], programs: Sequence[list[Operation]], odd: int) -> Callable[[], Result]:
    """Begins to run these programs; the result waits for their end.

    Args:
        setups: of each rank; those that differ may not finish.
        odd: the rank that does something else.
    """
    started = Started(len(programs), _run_own, setups, programs)

    def result() -> Result:
        found = started.endings()
        if any(setup != setups[0] for setup in setups):
            return found, judged(found, odd)
        return found, judged(found, odd, reference(setups[0], programs), list(map(losses_of, programs)))

    return result


def _run_own(
    rank: int, setups: Sequence[Setup], programs: Sequence[list[Operation]], losses: list[float]
) -> None:
    run(rank, setups[rank], programs[rank], losses)
