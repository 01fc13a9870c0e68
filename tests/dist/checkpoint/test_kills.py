"""Saves that are killed: a sample of what `python -m tests.support.faults kills` and `random-kills` try."""

from __future__ import annotations

from itertools import chain

import pytest

from tests.support.faults.kills import ALL, Kill, Kills, random_kills


@pytest.mark.parametrize("way", ["plain", "async", "fabric"])
def test_the_old_or_the_new_is_there_whatever_the_moment(way: str) -> None:
    """Kills saves around the commit, where the outcome changes, and at moments all over the save."""
    if way == "fabric":
        pytest.importorskip("flatfsdp.compat.lightning", reason="needs Lightning Fabric")
    with Kills() as kills:
        plan = Kill(way, True, ALL, 0)
        events, digests = kills.operations(plan)
        commit = events[0].index("replace old/.metadata") + 1
        last = len(events[0])
        for after in (2, commit - 1, commit, last - 1) if way == "plain" else (commit - 1, commit):
            kills.kill(plan._replace(after=after), digests)
        if way == "plain":
            # One rank is through when the other has not begun.
            kills.kill(plan._replace(victim=1, after=2, slow=1), digests)
        expected = (3, 2, []) if way == "plain" else (1, 1, [])
        assert (kills.count.old, kills.count.new, kills.count.wrong) == expected


def test_a_run_keeps_a_checkpoint_while_older_ones_are_removed() -> None:
    """The first checkpoint is removed after the second is complete: killed in between, and within."""
    with Kills() as kills:
        plan = Kill("manager", True, ALL, 0)
        events, digests = kills.operations(plan)
        commit = events[0].index("replace old/step-00000002/.metadata") + 1
        removal = events[0].index("rename old/removed-step-00000001") + 1
        assert events[0][removal].startswith("unlink old/removed-step-00000001/")
        for after in (commit - 1, commit, removal - 1, removal, removal + 1):
            kills.kill(plan._replace(after=after), digests)
        assert (kills.count.old, kills.count.new, kills.count.wrong) == (1, 4, [])


def test_a_save_that_goes_on_while_the_run_trains() -> None:
    """Killed before and after the commit, before and in the removal of the old one, and on one rank."""
    with Kills() as kills:
        plan = Kill("background", True, ALL, 0)
        events, digests = kills.operations(plan)
        commit = events[0].index("replace old/step-00000002/.metadata") + 1
        removal = events[0].index("rename old/removed-step-00000001") + 1
        assert commit < removal
        for after in (2, commit - 1, commit, removal - 1, removal + 1):
            kills.kill(plan._replace(after=after), digests)
        kills.kill(plan._replace(victim=1, after=3, slow=0), digests)
        assert (kills.count.old, kills.count.new, kills.count.wrong) == (3, 3, [])


def test_a_run_that_was_rolled_back_never_finds_the_middle_of_what_it_left() -> None:
    """Two later checkpoints are put aside before the save: killed before, in between, afterwards."""
    with Kills() as kills:
        plan = Kill("rollback", True, ALL, 0)
        events, digests = kills.operations(plan)
        first, second = (events[0].index(f"rename old/abandoned-step-0000000{step}") + 1 for step in (5, 6))
        commit = events[0].index("replace old/step-00000002/.metadata") + 1
        assert second == first + 1
        for after in (first, second, commit - 1, commit):
            kills.kill(plan._replace(after=after), digests)
        assert (kills.count.old, kills.count.new, kills.count.wrong) == (3, 1, [])


def test_a_save_to_a_store() -> None:
    """Killed before and after its last object is put, and in the removal of the old one."""
    with Kills() as kills:
        plan = Kill("store", True, ALL, 0)
        events, digests = kills.operations(plan)
        commit = events[0].index("replace old/step-00000002/.metadata") + 1
        assert events[0][commit] == "unlink old/step-00000001/.metadata"
        for after in (commit - 1, commit, commit + 1):
            kills.kill(plan._replace(after=after), digests)
        assert (kills.count.old, kills.count.new, kills.count.wrong) == (1, 2, [])


def test_tidying_may_be_stopped() -> None:
    """Tidying handles a damaged checkpoint and the rests of a save and a removal."""
    with Kills() as kills:
        plan = Kill("resume", True, ALL, 0)
        events, digests = kills.operations(plan)
        last = len(events[0])
        assert any(name == "rename old/damaged-step-00000002" for name in events[0])
        for after in (last - 4, last):
            kills.kill(plan._replace(after=after), digests)
        assert (kills.count.old, kills.count.new, kills.count.wrong) == (2, 0, [])


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
        for count in chain(
            random_kills(kills, 4, 0, ["plain", "async"]), random_kills(kills, 3, 0, ["background", "store"])
        ):
            assert count.wrong == []
        assert kills.count.tried == 7
