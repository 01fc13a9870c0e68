"""The numbers that travel with collectives say what they are for, and which of them may meet."""

from __future__ import annotations

import math

import pytest

from flatfsdp.comm.checking.identity import (
    FIRST_STEP,
    Action,
    Difference,
    Identity,
    ModelIdentity,
    compared,
    is_whole,
)
from flatfsdp.comm.ranks import ALONE, Ranks

MODEL = ModelIdentity(7, ["embedding", "blocks.0", "blocks.1"])
HERE = Identity(Action.FORWARD, MODEL, unit=1, step=3, microbatch=2)


@pytest.mark.parametrize(
    "other",
    [
        HERE._replace(action=Action.BACKWARD),
        HERE._replace(unit=2),
        HERE._replace(step=4),
        HERE._replace(model=ModelIdentity(8, MODEL.units)),
    ],
    ids=["action", "unit", "step", "model"],
)
def test_what_differs_is_compared(other: Identity) -> None:
    assert compared(other.number) != compared(HERE.number)


def test_norms_of_stages_may_meet() -> None:
    """Each is of its own model, of which other ranks have to hear if it stops."""
    one, other = (Identity(Action.NORM, ModelIdentity(number)) for number in (7, 8))
    assert one.number == other.number and one.model.number != other.model.number


def test_the_microbatch_is_told_and_not_compared() -> None:
    other = HERE._replace(microbatch=5)
    assert other.number != HERE.number and compared(other.number) == compared(HERE.number)


@pytest.mark.parametrize("action", Action)
def test_numbers_fit_and_are_never_zero(action: Action) -> None:
    largest = Identity(action, ModelIdentity(2**31 - 1), unit=2**20, step=2**40 + 5, microbatch=2**20)
    for identity in (Identity(action), largest):
        assert 0 < identity.number < 2**63
        assert is_whole(identity.number)


def test_part_of_a_number_is_no_number() -> None:
    """A number that replaces another one, or nothing, byte by byte."""
    number = HERE.number.to_bytes(8, "little")
    for before in (
        bytes(8),
        HERE._replace(action=Action.REPLAY, step=300, microbatch=9).number.to_bytes(8, "little"),
    ):
        for arrived in range(1, 8):
            parts = number[:arrived] + before[arrived:], before[:-arrived] + number[-arrived:]
            for part in set(parts) - {number, before}:
                assert not is_whole(int.from_bytes(part, "little"))


class FourRanks(Ranks):
    """Without a process group."""

    global_ranks = [4, 5, 6, 7]  # type: ignore[assignment]  # noqa: RUF012


def among(*numbers: int) -> Difference | None:
    return Difference.among(numbers, FourRanks(None, 4, 0))


def test_the_first_rank_that_differs_is_found() -> None:
    mine, other = HERE.number, HERE._replace(unit=2).number
    assert among(mine, mine, mine, mine) is None
    assert among(mine, mine, other, mine) == Difference(4, mine, 6, other)
    # What has not arrived is not known.
    assert among(0, mine, 0, 0) is None
    assert among(0, mine, 0, other) == Difference(5, mine, 7, other)


def test_the_message_names_both_units_and_what_each_rank_does() -> None:
    theirs = Identity(Action.SHOW, MODEL, unit=2, step=3)
    message = Difference(0, HERE.number, 1, theirs.number).message(MODEL)
    assert "rank 0 gathers unit blocks.0 for a forward (step 3, microbatch 2)" in message
    assert "rank 1 gathers whole tensors of unit blocks.1 (state_dict" in message


def test_the_message_knows_other_models_and_garbled_numbers() -> None:
    other = Identity(Action.REDUCE, ModelIdentity(9, ["a", "b"]), unit=1)
    message = Difference(0, other.number, 1, -12345).message(MODEL)
    assert "rank 0 reduces the gradients of unit 1 of another model" in message
    assert "rank 1 does something of another size" in message


def test_one_rank_alone_never_differs() -> None:
    assert Difference.among([HERE.number], ALONE) is None


def test_ranks_wait_longer_before_the_first_step_has_ended() -> None:
    model = ModelIdentity(timeout=2.0)
    assert Identity(Action.FORWARD, model, step=1).limit == 2.0
    assert Identity(Action.FORWARD, model).limit == Identity(Action.BUILD, model).limit == 2.0 * FIRST_STEP
    assert Identity(Action.SAVE, model).limit == 2.0
    assert Identity(Action.OBJECTS).limit is None
    assert Identity(Action.FORWARD, ModelIdentity(timeout=math.inf)).limit is None


@pytest.mark.parametrize("count", [0, 64])
def test_a_number_of_elements_is_no_number_of_steps(count: int) -> None:
    model = ModelIdentity(timeout=2.0)
    assert Identity.counting(Action.INPUTS, count, model, is_early=True).limit == 2.0 * FIRST_STEP
    assert Identity.counting(Action.INPUTS, count, model, is_early=False).limit == 2.0


def test_what_is_no_units_has_a_number_of_its_own() -> None:
    one, other = (Identity.counting(Action.EXCHANGE, elements) for elements in (2**20, 2**20 + 1))
    message = Difference(0, one.number, 1, other.number).message(MODEL)
    assert "rank 0 exchanges 1048576 elements between the ranks that share a layer, while rank 1" in message
    assert compared(one.number) != compared(other.number)
