"""Plans of stress examples, made of plain values, and how hypothesis draws them.

A plan prints as the call that makes it, without what has its default value:

    Plan(2, (Unit(Leaf('conv', frozen='everything')), Checkpoint(Leaf('tied'), 'reentrant')), width=3)

Next: `models.py` builds the model of a plan, `training.py` trains it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, fields
from functools import cache
from typing import Literal, get_args

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

LeafKind = Literal[
    "linear",
    "linear without bias",
    "mlp",
    "norm",
    "conv",
    "gru",
    "attention",
    "hook",
    "own gradient",
    "scalar",
    "vector",
    "detached vector",
    "embedding",
    "tied",
    "unused",
    "counter",
    "fuse",
]
"""`models.py` says what each computes; "fuse" is where a planned failure happens."""

Freeze = Literal["nothing", "first parameter", "everything"]
Container = Literal["list", "dict", "sequential"]
Recompute = Literal["reentrant", "non-reentrant"]
Form = Literal["tensor", "tuple", "dict", "dataclass", "none"]
"""What a module returns; "none": nothing, so that its caller goes on with its own input."""

Sharding = Literal["shard", "replicate", "hybrid"]
"""hybrid: a mesh of two replicas, each sharded over half of the ranks."""

Dtypes = Literal["fp64", "fp32", "bf16", "bf16, reduced in bf16"]
Schedule = Literal[
    "loop",
    "forwards first",
    "last forward first",
    "one forward ahead",
    "no_sync",
    "forwards under no_sync",
    "every backward reduces",
]
Interlude = Literal["evaluate", "inference mode", "failing evaluation", "state dict"]
FailWhere = Literal["forward", "backward", "recomputation", "after backward"]
"""The last one is the user's own code."""


class Spec:
    """Prints as the call that makes it: required fields by position, others by name unless default."""

    def __repr__(self) -> str:
        arguments = []
        for field in fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if field.default is MISSING:
                arguments.append(repr(value))
            elif value != field.default:
                arguments.append(f"{field.name}={value!r}")
        return f"{type(self).__name__}({', '.join(arguments)})"


# ---- modules: each maps a hidden state [batch, width] to another ----------------------------------------


@dataclass(frozen=True, repr=False)
class Leaf(Spec):
    kind: LeafKind
    frozen: Freeze = "nothing"


@dataclass(frozen=True, repr=False)
class Chain(Spec):
    """Children that run one after the other."""

    children: tuple[Node, ...]
    container: Container = "list"


@dataclass(frozen=True, repr=False)
class Branches(Spec):
    """The sum of what all make of the same input."""

    children: tuple[Node, ...]


@dataclass(frozen=True, repr=False)
class Residual(Spec):
    child: Node


@dataclass(frozen=True, repr=False)
class Repeat(Spec):
    """One module used twice in a row: under one name or two, each use recomputed or not."""

    child: Node
    two_names: bool = False
    first: Recompute | None = None
    second: Recompute | None = None


@dataclass(frozen=True, repr=False)
class Checkpoint(Spec):
    child: Node
    how: Recompute


@dataclass(frozen=True, repr=False)
class Skip(Spec):
    """Leaves the child out in these microbatches; if `rank` is given, on that rank only."""

    child: Node
    microbatches: tuple[int, ...]
    rank: int | None = None


@dataclass(frozen=True, repr=False)
class Return(Spec):
    """The child's result, in this form."""

    child: Node
    form: Form


@dataclass(frozen=True, repr=False)
class Frozen(Spec):
    """No parameter below trains."""

    child: Node


@dataclass(frozen=True, repr=False)
class Unit(Spec):
    """The child is wrapped in a FlatFSDP of its own."""

    child: Node


Node = Leaf | Chain | Branches | Residual | Repeat | Checkpoint | Skip | Return | Frozen | Unit


# ---- training -------------------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class Failure(Spec):
    """An exception in one microbatch, on all ranks alike; the step is then repeated without it."""

    microbatch: int
    where: FailWhere


@dataclass(frozen=True, repr=False)
class Step(Spec):
    """One optimizer step.

    Attributes:
        interludes: (n, what): after the n-th forward or backward, do this.
        reload: afterwards, load a state dict.
    """

    microbatches: int = 1
    schedule: Schedule = "loop"
    interludes: tuple[tuple[int, Interlude], ...] = ()
    failure: Failure | None = None
    reload: bool = False


@dataclass(frozen=True, repr=False)
class Plan(Spec):
    """One model and its training.

    Attributes:
        ranks: world size.
        body: modules between stem and head.
        width: of the hidden state.
        stem: a trained parameter before the body; without one, the body's input needs no gradient.
        output: form in which the model returns its loss.
    """

    ranks: int
    body: tuple[Node, ...]
    width: int = 2
    stem: bool = True
    output: Form = "tensor"
    sharding: Sharding = "shard"
    reshard_after_forward: bool = True
    every: bool = False
    prefetch_forward: int = 1
    prefetch_backward: int = 1
    poison: bool = False
    dtypes: Dtypes = "fp32"
    adam: bool = False
    clip: bool = False
    steps: tuple[Step, ...] = (Step(),)
    seed: int = 0


# ---- strategies: what is listed first is what hypothesis shrinks to; what is listed twice is likelier ---

MAX_MICROBATCHES = 4


def plans(ranks: int) -> SearchStrategy[Plan]:
    shardings = ["shard", "shard", "shard", "replicate"]
    if ranks == 4:
        shardings += ["hybrid", "hybrid"]
    stem = st.sampled_from([True, True, False])
    return st.tuples(stem, st.sampled_from(shardings)).flatmap(lambda drawn: _plans(ranks, *drawn))


@cache
def _plans(ranks: int, stem: bool, sharding: Sharding) -> SearchStrategy[Plan]:
    uneven = _is_uneven(ranks, stem, sharding)
    steps = _steps(uneven)
    return st.builds(
        Plan,
        ranks=st.just(ranks),
        body=_several(_nodes(ranks, uneven), [1, 2, 3, 4]),
        width=st.integers(1, 6),
        stem=st.just(stem),
        output=st.sampled_from(["tensor", "tuple", "dict", "dataclass"]),
        sharding=st.just(sharding),
        reshard_after_forward=st.sampled_from([True, True, False]),
        every=st.sampled_from([False, False, True]),
        prefetch_forward=st.sampled_from([1, 0, 2]),
        prefetch_backward=st.sampled_from([1, 0, 2]),
        poison=st.booleans(),
        dtypes=st.sampled_from(["fp32", "fp64", "fp64", "bf16", "bf16, reduced in bf16"]),
        adam=st.booleans(),
        clip=st.booleans(),
        steps=st.one_of(st.tuples(steps), st.tuples(steps, steps)),
        seed=st.integers(0, 999),
    )


def _is_uneven(ranks: int, stem: bool, sharding: Sharding) -> bool:
    """Whether a module may be left out by one rank and used by the others."""
    # Without a stem, what one rank leaves out decides which modules take part in its backward.  Sharded units
    # are gathered, freed and reduced in the same order on all ranks.
    return ranks > 1 and stem and sharding == "replicate"


def _several(node: SearchStrategy[Node], counts: Sequence[int]) -> SearchStrategy[tuple[Node, ...]]:
    """Tuples of any of these lengths; `st.lists` prefers short ones."""
    return st.sampled_from(counts).flatmap(lambda count: st.tuples(*[node] * count))


def _nodes(ranks: int, uneven: bool) -> SearchStrategy[Node]:
    kinds = [*get_args(LeafKind), "fuse", "detached vector"]
    if not uneven:
        return _weighted({_grown(_leaves(kinds), _parents, generations=3): 1, _blocks(_leaves(kinds)): 1})
    # What is left out cannot be where a step fails, which it does on all ranks.
    left_out = _grown(_leaves([kind for kind in kinds if kind != "fuse"]), _parents_in_a_unit, generations=1)
    skipped = st.builds(Skip, left_out, _some_microbatches(), st.integers(0, ranks - 1))
    return _grown(_weighted({_leaves(kinds): 2, skipped: 1}), _parents, generations=3)


def _blocks(leaf: SearchStrategy[Node]) -> SearchStrategy[Node]:
    """What most models are made of: units of a few layers, some residual, some recomputed."""
    recomputed = st.builds(Checkpoint, leaf, st.sampled_from(get_args(Recompute)))
    layer = _weighted({leaf: 1, recomputed: 1})
    layers = _several(_weighted({layer: 1, st.builds(Residual, layer): 1}), [2, 3])
    return layers.map(lambda parts: Unit(Chain(parts)))


def _grown(
    leaves: SearchStrategy[Node],
    parents: Callable[[SearchStrategy[Node]], SearchStrategy[Node]],
    generations: int,
) -> SearchStrategy[Node]:
    nodes = leaves
    for _ in range(generations):
        nodes = _weighted({leaves: 1, parents(nodes): 3})
    return nodes


def _leaves(kinds: Sequence[str]) -> SearchStrategy[Node]:
    frozen = st.sampled_from(["nothing", "nothing", "nothing", "nothing", "first parameter", "everything"])
    return st.builds(Leaf, st.sampled_from(kinds), frozen)


def _parents(child: SearchStrategy[Node]) -> SearchStrategy[Node]:
    return _weighted({st.builds(Unit, child): 1, _parents_in_a_unit(child): 1})


def _parents_in_a_unit(child: SearchStrategy[Node]) -> SearchStrategy[Node]:
    """Parents that are no units themselves."""
    children = _several(child, [1, 2, 2, 3])
    return _weighted(
        {
            st.builds(Chain, children, st.sampled_from(get_args(Container))): 4,
            st.builds(Branches, children): 2,
            st.builds(Residual, child): 1,
            st.builds(Checkpoint, child, st.sampled_from(get_args(Recompute))): 2,
            st.tuples(child, st.booleans(), _recomputed_uses()).map(_repeat): 1,
            st.builds(Skip, child, _some_microbatches()): 1,
            st.builds(Return, child, st.sampled_from(get_args(Form))): 1,
            st.builds(Frozen, child): 1,
        }
    )


def _weighted(choices: dict[SearchStrategy[Node], int]) -> SearchStrategy[Node]:
    """One of several by weight; `st.one_of` gives all the same chance."""
    return st.sampled_from([s for s, weight in choices.items() for _ in range(weight)]).flatmap(lambda s: s)


def _recomputed_uses() -> SearchStrategy[tuple[Recompute | None, Recompute | None]]:
    """Both uses in a reentrant checkpoint, or none: each has a backward, and gradients, of its own.

    With one use inside and one outside, the flag decides which of the two gradients is added first.
    """
    in_one_backward = st.sampled_from([None, "non-reentrant"])
    return st.one_of(st.tuples(in_one_backward, in_one_backward), st.just(("reentrant", "reentrant")))


def _repeat(drawn: tuple[Node, bool, tuple[Recompute | None, Recompute | None]]) -> Repeat:
    child, two_names, (first, second) = drawn
    return Repeat(child, two_names, first, second)


def _some_microbatches() -> SearchStrategy[tuple[int, ...]]:
    found = st.sets(st.integers(0, MAX_MICROBATCHES - 1), min_size=1, max_size=2)
    return found.map(lambda indices: tuple(sorted(indices)))


@st.composite
def _steps(draw: DrawFn, uneven: bool) -> Step:
    # In the middle of a backward, ranks that leave out different modules have reduced different units.
    wheres = ("forward", "after backward") if uneven else get_args(FailWhere)
    microbatches = draw(st.sampled_from([1, 2, 2, 3, MAX_MICROBATCHES]))
    moment = st.integers(0, 2 * microbatches - 1)
    interlude = st.tuples(moment, st.sampled_from(get_args(Interlude)))
    failure = st.builds(Failure, st.integers(0, microbatches - 1), st.sampled_from(wheres))
    return Step(
        microbatches,
        draw(st.sampled_from(get_args(Schedule))),
        tuple(draw(st.lists(interlude, max_size=2))),
        draw(st.none() | failure),
        draw(st.booleans()),
    )
