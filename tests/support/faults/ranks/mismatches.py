"""51 kinds of ranks that differ; the second of two ranks is the odd one.

`python -m tests.support.faults mismatches` runs them, and `docs/ranks.md` has what it prints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from tests.support.faults.ranks.llamas import Difference, Where, run_autocast, run_llama
from tests.support.faults.ranks.processes import Started, judged
from tests.support.faults.ranks.program import Do, Microbatch, Operation, Setup, Step
from tests.support.faults.ranks.trials import Result, begun

STEPS, MICROBATCHES, ODD = 3, 2, 1
LATE = 6.0
"""Seconds that an idle rank sleeps: longer than the others wait."""


@dataclass(frozen=True)
class Mismatch:
    """One kind.

    Attributes:
        setup: of the first rank.
        odd_setup: of the second; None for the same.
        program, odd_program: likewise.
        other: a function that both ranks run, and its arguments; then nothing else counts.
        is_slow: whether ranks wait for their time limit.
    """

    name: str
    setup: Setup = field(default_factory=Setup)
    odd_setup: Setup | None = None
    program: tuple[Operation, ...] = ()
    odd_program: tuple[Operation, ...] | None = None
    other: tuple[Callable[..., None], tuple[Any, ...]] | None = None
    is_slow: bool = False

    def begun(self) -> Callable[[], Result]:
        """Begins; the result waits until both ranks have ended."""
        if self.other is not None:
            function, arguments = self.other
            started = Started(2, function, *arguments)
            return lambda: (found := started.endings(), judged(found, ODD))
        setups = [self.setup, self.odd_setup or self.setup]
        programs = [list(self.program), list(self.odd_program or self.program)]
        return begun(setups, programs, ODD)

    def run(self) -> Result:
        """How both ranks end, and what that is worth."""
        return self.begun()()


def usual(clips: bool = False, steps: int = STEPS, microbatches: int = MICROBATCHES) -> list[Operation]:
    """Some steps, each of some microbatches."""
    program: list[Operation] = []
    for step in range(steps):
        program += [Microbatch(10 * step + index) for index in range(microbatches)]
        program.append(Step(clips=clips))
    return program


def _with(*extra: Operation, at: int = 4) -> tuple[Operation, ...]:
    """The usual program with something before an operation: by default before the second step's last
    microbatch."""
    program = usual()
    return (*program[:at], *extra, *program[at:])


def _changed(*, at: int = 4, **changes: Any) -> tuple[Operation, ...]:
    """The usual program with one operation changed: by default the second step's last microbatch."""
    program = usual()
    program[at] = replace(program[at], **changes)
    return tuple(program)


USUAL = tuple(usual())
KEPT = Setup(reshard=False)


def _odd(name: str, *program: Operation, setup: Setup | None = None, is_slow: bool = False) -> Mismatch:
    return Mismatch(name, setup or Setup(), None, USUAL, program, is_slow=is_slow)


def _at_construction() -> Iterator[Mismatch]:
    for name, changes in {
        "another width": {"width": 16},
        "another depth": {"blocks": 4},
        "other units": {"units": "first"},
        "another dtype": {"compute": torch.bfloat16},
        "another ZeRO stage": {"reshard": False},
        "another grad_sync": {"grad_sync": "every"},
        "another part is frozen": {"frozen": True},
    }.items():
        yield Mismatch(name, Setup(), replace(Setup(), **changes), USUAL)
    for what in ("hidden", "layers", "ffn"):
        yield _llama("tp", what)
    for what in ("hidden", "seq", "batch", "layers", "ffn", "microbatches"):
        yield _llama("pp", what)
    for what in ("seq", "batch", "microbatches"):
        yield _llama("tp", what)


def _llama(where: Where, what: Difference) -> Mismatch:
    return Mismatch(f"{where.upper()} 2: {what}", other=(run_llama, (where, what)))


def _exceptions() -> Iterator[Mismatch]:
    for where in ("forward", "backward"):
        yield _odd(f"an exception in the {where}, then exit", *_changed(raises=where))
    yield _odd("an exception in the optimizer, then exit", *_changed(raises=True, at=5))
    for where in ("forward", "backward"):
        for zeroes in (False, True) if where == "forward" else (False,):
            caught = _changed(raises=where, is_caught=True, zeroes=zeroes)
            after = ", calls zero_grad()" if zeroes else ""
            yield _odd(f"catches an exception in the {where}{after} and goes on", *caught)
    clipping = tuple(usual(clips=True))
    caught = list(clipping)
    caught[5] = Step(raises=True, is_caught=True, clips=True)
    name = "catches an exception in the optimizer and goes on"
    yield Mismatch(name, Setup(), None, clipping, tuple(caught))


def _ends() -> Iterator[Mismatch]:
    yield _odd("is killed within a step", *_with(Do("kill")))
    yield _odd("is stopped", *_with(Do("stop")), is_slow=True)
    yield _odd("ends one step early", *usual(steps=STEPS - 1))
    yield _odd("ends one step early, and stays", *usual(steps=STEPS - 1), Do("sleep", LATE), is_slow=True)
    for where in ("pp", "tp"):
        for what in ("killed", "raises", "skips a step"):
            yield _llama(where, what)  # type: ignore[arg-type]


def _asks_alone() -> Iterator[Mismatch]:
    yield _odd("state_dict", *_with(Do("state dict"), at=3))
    yield _odd("checkpoint.save", *_with(Do("save", path="never written"), at=3))
    yield _odd("clip_grad_norm_", *_with(Do("clip"), at=5))
    yield _odd("summon_full_params", *_with(Do("summon"), at=3))
    yield _odd("an evaluation", *_with(Do("evaluate"), at=3))
    idle = (*USUAL[:3], Do("sleep", LATE))
    yield Mismatch(
        "state_dict, and the other is idle", Setup(), None, idle, _with(Do("state dict"), at=3), is_slow=True
    )
    both = _with(Do("save", path="first"), at=3), _with(Do("save", path="second"), at=3)
    yield Mismatch("checkpoints in different folders", Setup(), None, *both)


def _microbatches() -> Iterator[Mismatch]:
    more = (*USUAL[:4], Microbatch(77), *USUAL[4:])
    yield _odd("one more microbatch", *more)
    clipping = tuple(usual(clips=True))
    with_more = (*clipping[:4], Microbatch(77), *clipping[4:])
    yield Mismatch("one more microbatch, with clipping", Setup(), None, clipping, with_more)
    yield _odd("no batch in one step", *USUAL[:3], *USUAL[5:])
    unused = _changed(is_used=False)
    yield _odd("a loss that uses no parameter", *unused)
    yield _odd("leaves out a unit, ZeRO-3", *_changed(order=(0, 2)))


def _silent_once() -> Iterator[Mismatch]:
    for name, setup in (("ZeRO-3", Setup()), ("ZeRO-2", KEPT)):
        reverse = _changed(order=(2, 1, 0), at=3)
        yield _odd(f"equal units in another order, {name}", *reverse, setup=setup)


MISMATCHES = {
    each.name: each
    for each in (
        *_at_construction(),
        Mismatch("FP8 autocast on one rank", other=(run_autocast, ())),
        *_silent_once(),
        *_asks_alone(),
        *_microbatches(),
        *_exceptions(),
        *_ends(),
    )
}
"""By name."""
