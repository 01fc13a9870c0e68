"""The random state around restores: what an eager microbatch tells, and where a replay puts the states."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.random import fork_rng

from flatfsdp.comm import cuda_graphs
from flatfsdp.comm.cuda_graphs import Graph, RandomMoves, watched

GPU = torch.device("cuda", 0)


class Generator:
    """A generator of GPU 0 that only counts what is drawn; `held` is its state, which several may share."""

    def __init__(self, device: torch.device = GPU, seed: int = 5, offset: int = 0) -> None:
        self.device, self.held = device, [seed, offset]

    def draw(self, count: int) -> None:
        self.held[1] += count

    def get_offset(self) -> int:
        return self.held[1]

    def set_offset(self, offset: int) -> None:
        self.held[1] = offset

    def initial_seed(self) -> int:
        return self.held[0]

    def manual_seed(self, seed: int) -> None:
        self.held[:] = seed, 0

    def get_state(self) -> Tensor:
        return torch.tensor(self.held)

    def set_state(self, state: Tensor) -> None:
        self.held[:] = state.tolist()

    def graphsafe_get_state(self) -> Any:
        return mock.Mock(held=self.held)

    def graphsafe_set_state(self, other: Any) -> None:
        self.held = other.held


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(cuda_graphs.torch, "Generator", Generator)


def checkpointed(generator: Any, draws: int) -> Callable[[], None]:
    """Forward of a checkpointed block; returns its recomputation, as `torch.utils.checkpoint` does both."""
    saved = torch.cuda.get_rng_state()
    generator.draw(draws)

    def again() -> None:
        with fork_rng([0], device_type="cuda"):
            torch.cuda.set_rng_state(saved)
            generator.draw(draws)

    return again


def microbatch(generator: Any, draws: int = 8) -> list[int]:
    """Two checkpointed blocks, and numbers drawn before, between and after; the offsets of all draws."""
    at: list[int] = []

    def drawing(count: int) -> None:
        at.append(generator.held[1])
        type(generator).draw(generator, count)

    with mock.patch.object(generator, "draw", drawing):
        generator.draw(draws)
        first = checkpointed(generator, draws)
        second = checkpointed(generator, 2 * draws)
        generator.draw(draws)
        second()
        first()
        generator.draw(draws)
    return at


def test_an_eager_microbatch_tells_where_it_restores() -> None:
    generator: Any = Generator(offset=100)
    with watched(generator) as moves:
        eager = microbatch(generator)
    assert eager == [100, 108, 116, 132, 116, 108, 140]
    assert moves == RandomMoves(restored=[16, 40, 8, 40], end=48, draws=True)


def test_a_recording_draws_where_an_eager_microbatch_does() -> None:
    generator: Any = Generator(offset=100)
    with watched(generator) as moves:
        microbatch(generator)
    recorded = Graph(mock.Mock(), generator, moves)
    # As a graph does: recorded from offset 0 of each state on, and added up in a replay.
    begin = generator.get_offset()
    for state, distance in zip(recorded.states, moves.restored, strict=True):
        state.set_offset(begin + distance)
    own = generator.held
    with recorded.recorded():
        found = microbatch(generator)
    assert generator.held is own
    assert found == [begin + each - 100 for each in (100, 108, 116, 132, 116, 108, 140)]


def test_a_replay_leaves_the_generator_where_an_eager_microbatch_does() -> None:
    generator: Any = Generator(seed=7, offset=64)

    def replay() -> None:
        assert [state.held for state in recorded.states] == [[7, 80], [7, 104]]
        generator.draw(24)  # the graph's own draws from this state

    cuda_graph = mock.Mock(replay=replay)
    recorded: Any = Graph(cuda_graph, generator, RandomMoves([16, 40], end=48, draws=True))
    recorded.replay()
    assert generator.held == [7, 112]
    assert [each.args for each in cuda_graph.register_generator_state.call_args_list] == [
        (state,) for state in recorded.states
    ]


def test_nothing_is_kept_where_nothing_is_drawn() -> None:
    generator: Any = Generator()
    with watched(generator) as moves:
        microbatch(generator, draws=0)
    assert not moves.draws and len(moves.restored) == 4
    recorded = Graph(mock.Mock(), generator, moves)
    assert not recorded.states
    with recorded.recorded():
        microbatch(generator, draws=0)


def test_draws_that_a_restore_undoes_count() -> None:
    generator: Any = Generator()
    with watched(generator) as moves, fork_rng([0], device_type="cuda"):
        generator.draw(4)
    assert moves == RandomMoves(restored=[0], end=0, draws=True)


def test_another_seed_is_noticed() -> None:
    generator: Any = Generator()
    with watched(generator) as moves:
        torch.cuda.set_rng_state(torch.tensor([9, 0]))
    assert moves.reseeds


@pytest.mark.parametrize(
    "seeds", ["torch.manual_seed", "torch.cuda.manual_seed", "torch.cuda.manual_seed_all"]
)
def test_a_seed_is_noticed(seeds: str) -> None:
    """A capture would ignore the seed that the generator has already, and replays go on with new numbers."""
    generator: Any = Generator()
    before = vars(torch.cuda).copy()
    with watched(generator) as moves:
        attrgetter(seeds.removeprefix("torch."))(torch)(5)
    assert moves.reseeds and vars(torch.cuda) == before


def test_another_number_of_restores_raises() -> None:
    generator: Any = Generator()
    recorded = Graph(mock.Mock(), generator, RandomMoves([0], end=0))
    with pytest.raises(RuntimeError, match=r"restored the random state 4 times, where .* did so 1 times"):
        with recorded.recorded():
            microbatch(generator)


def test_the_functions_of_pytorch_are_back_afterwards() -> None:
    before = torch.cuda.get_rng_state, torch.cuda.set_rng_state
    generator: Any = Generator()
    with pytest.raises(ZeroDivisionError), watched(generator):
        raise ZeroDivisionError
    assert before == (torch.cuda.get_rng_state, torch.cuda.set_rng_state)
