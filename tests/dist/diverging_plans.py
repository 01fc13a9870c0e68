"""What one diverging example is: a plan, made of plain values, and how hypothesis draws one.

A plan is a small model, its training, and one thing that one rank does differently at one point:

    Plan(2, (Block(), Block()), Divergence('another order', (1, 0)), steps=1)

Next: `diverging_training.py` trains it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from tests.dist.stress_plans import (
    Chain,
    Checkpoint,
    Dtypes,
    Leaf,
    Node,
    Recompute,
    Schedule,
    Sharding,
    Spec,
    Unit,
)

What = Literal[
    "another order",
    "leaves a block out",
    "runs a block twice",
    "a block returns its input",
    "evaluates",
    "forward without backward",
    "state dict",
    "summons parameters",
    "clips",
    "one more microbatch",
    "one more reduction",
    "skips the optimizer",
    "swaps microbatches",
]
"""What one rank does and the others do not.

    the first four            in the forward of one microbatch
    "swaps microbatches"      that microbatch's data come from the next one, and the other way round
    "one more microbatch"     before it, inside no_sync()
    "one more reduction"      at the end of the step, a forward and a backward that reduces
    "skips the optimizer"     at the end of the step
    "clips"                   there, too, to a norm so large that nothing changes
    all others                before the microbatch's forward
"""

Start = Literal["nothing", "scale", "embedding"]
Head = Literal["nothing", "linear", "tied"]


SIMPLE = Leaf("linear")


@dataclass(frozen=True, repr=False)
class Block(Spec):
    """A unit that adds its body's result to its input.

    Attributes:
        recompute: the call of the whole unit.
    """

    body: Node = SIMPLE
    recompute: Recompute | None = None


@dataclass(frozen=True, repr=False)
class Divergence(Spec):
    """
    Attributes:
        blocks: that the rank runs, in this order; or those that return their input.
    """

    what: What
    blocks: tuple[int, ...] = ()
    rank: int = 0
    step: int = 0
    microbatch: int = 0


@dataclass(frozen=True, repr=False)
class Plan(Spec):
    """One model, its training, and where one rank leaves the others.

    Attributes:
        ranks: world size.
        start: what the root has before its blocks: a parameter, an embedding.
        head: what it has after them; "tied" is the embedding's weight.
        again: a block that all ranks use once more, at the end.
        microbatches: of each step.
    """

    ranks: int
    blocks: tuple[Block, ...]
    divergence: Divergence
    start: Start = "scale"
    head: Head = "linear"
    again: int | None = None
    width: int = 4
    sharding: Sharding = "shard"
    reshard_after_forward: bool = True
    flag: bool = False
    every: bool = False
    prefetch_forward: int = 1
    prefetch_backward: int = 1
    poison: bool = False
    dtypes: Dtypes = "fp32"
    schedule: Schedule = "loop"
    microbatches: int = 1
    steps: int = 2
    seed: int = 0

    @property
    def order(self) -> tuple[int, ...]:
        """The blocks as all ranks run them."""
        return _order(len(self.blocks), self.again)

    @property
    def shard_size(self) -> int:
        """How many ranks share one copy of the parameters; neighbours do."""
        return {"shard": self.ranks, "hybrid": self.ranks // 2, "replicate": 1}[self.sharding]


def _order(blocks: int, again: int | None) -> tuple[int, ...]:
    return (*range(blocks), *(() if again is None else (again,)))


# ---- strategies: what is listed first is what hypothesis prefers; what is listed twice is likelier -------

BODIES: list[Node] = [
    SIMPLE,
    SIMPLE,
    Leaf("mlp"),
    Leaf("norm"),
    Leaf("tied"),
    Leaf("linear", frozen="everything"),
    Leaf("linear", frozen="first parameter"),
    Chain((SIMPLE, Unit(SIMPLE))),
    Checkpoint(SIMPLE, "non-reentrant"),
    Checkpoint(SIMPLE, "reentrant"),
]
ENDS: list[tuple[Start, Head]] = [
    ("scale", "linear"),
    ("embedding", "linear"),
    ("embedding", "tied"),
    ("nothing", "linear"),
    ("scale", "nothing"),
    ("nothing", "nothing"),
]


@st.composite
def plans(draw: DrawFn, ranks: int) -> Plan:
    what = draw(st.sampled_from(get_args(What)))
    ends = draw(st.sampled_from(ENDS))
    blocks = draw(_blocks(has_root=ends != ("nothing", "nothing")))
    again = draw(st.sampled_from([None, None, *range(len(blocks))]))
    microbatches = draw(st.sampled_from([1, 2, 3] if what != "swaps microbatches" else [2, 3]))
    steps = draw(st.sampled_from([1, 2, 3]))
    order = _order(len(blocks), again)
    divergence = Divergence(
        what,
        draw(_diverging_blocks(what, order)),
        draw(st.integers(0, ranks - 1)),
        draw(st.integers(0, steps - 1)),
        draw(st.integers(0, microbatches - 1)),
    )
    shardings = ["shard", "shard", "shard", "replicate"] + ["hybrid"] * 3 * (ranks == 4)
    return Plan(
        ranks,
        blocks,
        divergence,
        *ends,
        again,
        sharding=draw(st.sampled_from(shardings)),
        reshard_after_forward=draw(st.sampled_from([True, True, False])),
        flag=draw(st.booleans()),
        every=draw(st.sampled_from([False, False, True])),
        prefetch_forward=draw(st.sampled_from([1, 0, 2])),
        prefetch_backward=draw(st.sampled_from([1, 0, 2])),
        poison=draw(st.booleans()),
        dtypes=draw(st.sampled_from(["fp32", "fp32", "bf16"])),
        schedule=draw(st.sampled_from(get_args(Schedule))),
        microbatches=microbatches,
        steps=steps,
        seed=draw(st.integers(0, 999)),
    )


@st.composite
def _blocks(draw: DrawFn, has_root: bool) -> tuple[Block, ...]:
    """Of equal size or not; simple ones where no parameter of the root makes sure that the loss has one."""
    count = draw(st.integers(2, 5))
    if not has_root:
        return (Block(),) * count
    block = st.builds(
        Block,
        st.sampled_from(BODIES),
        st.sampled_from([None, None, None, *get_args(Recompute)]),
    )
    if draw(st.sampled_from([True, True, False])):
        return (draw(block),) * count
    return tuple(draw(st.lists(block, min_size=count, max_size=count)))


@st.composite
def _diverging_blocks(draw: DrawFn, what: What, order: tuple[int, ...]) -> tuple[int, ...]:
    place = draw(st.integers(0, len(order) - 1))
    if what == "another order":
        others = st.permutations(order).map(tuple).filter(lambda found: found != order)
        return draw(st.one_of(st.just(order[::-1]), others)) if order != order[::-1] else draw(others)
    if what == "leaves a block out":
        return order[:place] + order[place + 1 :]
    if what == "runs a block twice":
        return order[: place + 1] + order[place:]
    if what == "a block returns its input":
        return (order[place],)
    return ()
