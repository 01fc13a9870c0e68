"""Plans of diverging examples, made of plain values, and how they are drawn.

A plan is a small model, its training, and one thing that one rank does differently at one point:

    Plan(2, (Block(), Block()), Divergence('another order', (1, 0)), steps=1)

Next: `training.py` trains it.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Literal, get_args

from tests.support.stress.plans import (
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

    @property
    def holds_units(self) -> bool:
        """Whether there are units inside, which are not called where the block returns its input."""
        return isinstance(self.body, Chain) and any(isinstance(part, Unit) for part in self.body.children)


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


# ---- random plans: what is listed twice is likelier -----------------------------------------------------

BODIES: list[Node] = [
    SIMPLE,
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


def random_plan(ranks: int, chance: Random) -> Plan:
    """Not drawn by hypothesis, which prefers plans like those it has drawn before."""
    what = chance.choice(get_args(What))
    start, head = chance.choice(ENDS)
    # Some parameter has to get a gradient, whatever a rank leaves out.
    blocks = _blocks(chance, simple=start == head == "nothing")
    again = chance.choice([None, None, chance.randrange(len(blocks))])
    microbatches = chance.choice([1, 2, 3] if what != "swaps microbatches" else [2, 3])
    steps = chance.choice([1, 2, 3])
    divergence = Divergence(
        what,
        _diverging_blocks(chance, what, _order(len(blocks), again)),
        chance.randrange(ranks),
        chance.randrange(steps),
        chance.randrange(microbatches),
    )
    return Plan(
        ranks,
        blocks,
        divergence,
        start,
        head,
        again,
        sharding=chance.choice(["shard", "shard", "shard", "replicate"] + ["hybrid"] * 3 * (ranks == 4)),
        reshard_after_forward=chance.choice([True, True, False]),
        flag=chance.choice([False, True]),
        every=chance.choice([False, False, True]),
        prefetch_forward=chance.choice([0, 1, 2]),
        prefetch_backward=chance.choice([0, 1, 2]),
        poison=chance.choice([False, True]),
        dtypes=chance.choice(["fp32", "fp32", "bf16"]),
        schedule=chance.choice(get_args(Schedule)),
        microbatches=microbatches,
        steps=steps,
        seed=chance.randrange(1000),
    )


def _blocks(chance: Random, *, simple: bool) -> tuple[Block, ...]:
    """Blocks of equal size or not."""
    count = chance.randint(2, 5)
    if simple:
        return (Block(),) * count
    recomputes = [None, None, None, *get_args(Recompute)]
    drawn = [Block(chance.choice(BODIES), chance.choice(recomputes)) for _ in range(count)]
    return tuple(drawn) if chance.random() < 1 / 3 else (drawn[0],) * count


def _diverging_blocks(chance: Random, what: What, order: tuple[int, ...]) -> tuple[int, ...]:
    place = chance.randrange(len(order))
    if what == "another order":
        found = order[::-1] if chance.random() < 1 / 2 else order
        while found == order:
            found = tuple(chance.sample(order, len(order)))
        return found
    if what == "leaves a block out":
        return order[:place] + order[place + 1 :]
    if what == "runs a block twice":
        return order[: place + 1] + order[place:]
    if what == "a block returns its input":
        return (order[place],)
    return ()
