"""Saves that are killed: a sample of what `python -m tests.support.faults kills` and `random-kills` try."""

from __future__ import annotations

import pytest

from tests.support.faults.kills import ALL, Kill, Kills, random_kills
from tests.support.faults.training import SAVES


@pytest.mark.parametrize("save", SAVES)
def test_the_old_or_the_new_is_there_whatever_the_moment(save: str) -> None:
    """Killed around the commit, where the outcome changes, and at moments all over the save."""
    if save == "fabric":
        pytest.importorskip("flatfsdp.compat.lightning", reason="needs Lightning Fabric")
    with Kills() as kills:
        plan = Kill(save, True, ALL, 0)
        events, digests = kills.operations(plan)
        commit = events[0].index("replace old/.metadata") + 1
        last = len(events[0])
        for after in (2, commit - 1, commit, last - 1) if save == "plain" else (commit - 1, commit):
            kills.kill(plan._replace(after=after), digests)
        if save == "plain":
            # One rank is through when the other has not begun.
            kills.kill(plan._replace(victim=1, after=2, slow=1), digests)
        expected = (3, 2, []) if save == "plain" else (1, 1, [])
        assert (kills.count.old, kills.count.new, kills.count.wrong) == expected


def test_a_new_folder_is_not_taken_for_a_checkpoint_too_early() -> None:
    with Kills() as kills:
        plan = Kill("plain", False, ALL, 0)
        events, digests = kills.operations(plan)
        commit = events[0].index("replace new/.metadata") + 1
        for after in (1, commit // 2, commit - 1, commit):
            kills.kill(plan._replace(after=after), digests)
        assert (kills.count.old, kills.count.new, kills.count.wrong) == (3, 1, [])


def test_training_that_is_killed_at_random_times() -> None:
    with Kills() as kills:
        for count in random_kills(kills, 4, 0, ["plain", "async"]):
            assert count.wrong == []
        assert kills.count.tried == 4
