"""Models with many layers that are alike: a few of them are traced, and the others follow.

In:   a `Training`, whose model may have lists of layers.
Out:  the `Trace` of the whole model.

All bytes and seconds of a step are linear in the number of equal layers, once there are enough for what is
gathered ahead and reduced behind.  So one trace has a few layers of each kind, another one a layer more, and
the difference is what each further layer brings.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from flatfsdp.engine.whole.memory import units_ahead
from flatfsdp.options import Prefetch
from flatfsdp.plan.machine import Machine
from flatfsdp.plan.trace.live_memory import LiveMemory
from flatfsdp.plan.trace.observer import OperatorObserver
from flatfsdp.plan.trace.on_meta import META, move_to_meta
from flatfsdp.plan.trace.ranks import imagined_ranks
from flatfsdp.plan.trace.step import Moment, Trace, Training, UnitTrace, trace
from flatfsdp.plan.trace.work import Load, StepWork, total

K = TypeVar("K")


@dataclass(frozen=True)
class Run:
    """Layers of one list that are alike.

    Attributes:
        owner: name of the list.
        begin: number of the first of them, as it is in names.
        count: how many there are.
        behind: how many other layers of the list follow.
    """

    owner: str
    begin: int
    count: int
    behind: int = 0

    def number(self, name: str) -> str:
        """Number of the layer that a module is in; empty for others."""
        prefix = self._prefix
        number = name.removeprefix(prefix).partition(".")[0] if name.startswith(prefix) else ""
        return number if number.removeprefix("-").isdigit() else ""

    def position(self, name: str) -> int:
        """How many layers of the run are before the one that a module is in; negative for others."""
        number = self.number(name)
        return int(number) - self.begin if number else -1

    def has(self, name: str) -> bool:
        """Whether a module is in a layer of the run, whose last ones have negative numbers."""
        if not (number := self.number(name)):
            return False
        return int(number) < -self.behind if number.startswith("-") else int(number) >= self.begin

    def renamed(self, name: str, number: int) -> str:
        """The name of the same module in another layer."""
        _, dot, rest = name.removeprefix(self._prefix).partition(".")
        return f"{self._prefix}{number}{dot}{rest}"

    @property
    def _prefix(self) -> str:
        return f"{self.owner}." if self.owner else ""


class Layered(NamedTuple):
    """Traces of a model with a few layers, from which those of any number follow.

    Units behind the middle of a run have negative numbers, counted from the end of the list.

    Attributes:
        base: a few layers in each run; or the whole model, if there are no runs.
        longer: one layer more in one of the runs.
    """

    base: Trace
    longer: Mapping[Run, Trace]

    def whole(self, counts: Mapping[str, int]) -> Trace:
        """The trace of the whole model.

        Args:
            counts: numbers of layers by name of the list, other than those of the model.
        """
        if not self.longer:
            return self.base
        longer = {
            replace(run, count=counts.get(run.owner, run.count)): each for run, each in self.longer.items()
        }
        return _extended(self.base, longer)


def most_traced(prefetch: Prefetch) -> int:
    """The largest number of equal layers that are traced.

    The middle one is what all others are.  At both ends fewer units are gathered ahead, or reduced behind.
    """
    return 2 * (2 + max(1, units_ahead(prefetch))) + 1


def trace_layers(training: Training, machine: Machine) -> Layered:
    """Runs the steps, with no more layers than needed.

    Raises:
        NotImplementedError, ValueError: as `trace`.
        RuntimeError: if the process belongs to real ranks already.
    """
    most = most_traced(training.options["prefetch"])
    side = most // 2
    with imagined_ranks(training.ranks) as imagined:
        with META, OperatorObserver(LiveMemory(), StepWork(machine, None, None)):
            model = training.build(imagined.tp_group)
        move_to_meta(model)
        runs = [run for run in runs_of(model) if run.count > most]

        def traced(sizes: Mapping[Run, int]) -> Trace:
            def rename(name: str) -> str:
                for run, size in sizes.items():
                    if (left := size - run.position(name)) <= side:
                        return run.renamed(name, -left - run.behind)
                return name

            with _cut(model, sizes):
                # Groups are not copied.
                part = copy.deepcopy(model, {id(imagined.tp_group): imagined.tp_group})
            return trace(training, part, imagined, machine, rename)

        if runs:
            sizes = dict.fromkeys(runs, most - 1)
            longer = {run: traced({**sizes, run: most}) for run in runs}
            if all(_is_regular(run, side, each) for run, each in longer.items()):
                return Layered(traced(sizes), longer)
        return Layered(trace(training, model, imagined, machine), {})


# ---- models with fewer layers ---------------------------------------------------------------------------


@contextmanager
def _cut(model: nn.Module, sizes: Mapping[Run, int]) -> Iterator[None]:
    """Context in which each run has fewer layers; the numbers behind close up."""
    whole = {run: model.get_submodule(run.owner)._modules for run in sizes}
    for run, size in sizes.items():
        names, layers = list(whole[run]), list(whole[run].values())
        first = run.begin - int(names[0])
        del layers[first + size : first + run.count]
        model.get_submodule(run.owner)._modules = dict(zip(names, layers, strict=False))
    try:
        yield
    finally:
        for run, modules in whole.items():
            model.get_submodule(run.owner)._modules = modules


def _is_regular(run: Run, side: int, longer: Trace) -> bool:
    """Whether layers do the same, wherever they are; attributes do not show everything."""

    def work(number: int) -> list[Any]:
        return [
            (each.parameters, each.loads) for each in longer.units if run.number(each.name) == str(number)
        ]

    middle = run.begin + side
    return work(middle - 1) == work(middle) == work(-side - run.behind)


def _extended(base: Trace, longer: Mapping[Run, Trace]) -> Trace:
    """The trace of a model with as many layers as the runs say."""
    names = {unit.name for unit in base.units}
    more = {run: run.count - len({run.number(name) for name in names if run.has(name)}) for run in longer}
    steps = [(more[run], each) for run, each in longer.items()]

    def real(name: str) -> str:
        for run in longer:
            if (number := run.number(name)).startswith("-"):
                return run.renamed(name, run.begin + run.count + run.behind + int(number))
        return name

    def at(moment: Moment) -> Moment:
        return moment._replace(unit=real(moment.unit))

    def linear(own: Mapping[K, int], others: Iterable[Mapping[K, int]]) -> dict[K, int]:
        found = dict(own)
        for (times, _), other in zip(steps, others, strict=True):
            for key in found.keys() | other.keys():
                found[key] = found.get(key, 0) + times * (other.get(key, 0) - own.get(key, 0))
        return found

    def work(own: Load, others: Iterable[Load]) -> Load:
        pairs = zip(steps, others, strict=True)
        more = [total([other, own.times(-1)]).times(times) for (times, _), other in pairs]
        return total([own, *more])

    others = [{unit.name: unit for unit in each.units} for _, each in steps]
    units: list[UnitTrace] = []
    ahead = dict(longer)
    for unit in base.units:
        for run in [run for run in ahead if run.number(unit.name).startswith("-")]:
            inside = [each for each in ahead.pop(run).units if each.name not in names]
            units += [
                each._replace(name=run.renamed(each.name, int(run.number(each.name)) + number))
                for number in range(more[run])
                for each in inside
            ]
        loads = {
            key: work(load, [each[unit.name].loads.get(key, Load()) for each in others])
            for key, load in unit.loads.items()
        }
        saved = linear(unit.saved, [each[unit.name].saved for each in others])
        units.append(unit._replace(name=real(unit.name), loads=loads, saved=saved))
    traces = longer.values()
    return Trace(
        units=tuple(
            unit._replace(saved={at(moment): nbytes for moment, nbytes in unit.saved.items()})
            for unit in units
        ),
        static=linear(base.static, [each.static for each in traces]),
        given=base.given,
        moments={
            at(moment): linear(held, [each.moments.get(moment, held) for each in traces])
            for moment, held in base.moments.items()
        },
        waiting=tuple(map(linear, base.waiting, zip(*(each.waiting for each in traces), strict=True))),
        sent=tuple(map(linear, base.sent, zip(*(each.sent for each in traces), strict=True))),
        optimizer=work(base.optimizer, [each.optimizer for each in traces]),
    )


# ---- layers that are alike ------------------------------------------------------------------------------


def runs_of(model: nn.Module) -> list[Run]:
    """The longest run of layers that are alike in each outermost list of modules."""
    lists: dict[str, nn.Module] = {}
    for name, each in model.named_modules():
        is_inside = any(not other or name.startswith(f"{other}.") for other in lists)
        numbered = all(key.isdigit() for key in each._modules)
        if isinstance(each, nn.ModuleList | nn.Sequential | nn.ModuleDict) and numbered and not is_inside:
            lists[name] = each
    shared = _shared(model)
    return [_longest(model, name, each, shared) for name, each in lists.items()]


def _longest(model: nn.Module, name: str, owner: nn.Module, shared: set[int]) -> Run:
    parent = model.get_submodule(name.rpartition(".")[0])
    settings = vars(getattr(parent, "config", parent)).values()
    layers = list(owner.named_children())
    by_layer = [each for each in settings if isinstance(each, list | tuple) and len(each) == len(layers)]
    best = run = Run(name, 0, 0)
    before: tuple[int, Form] | None = None
    for at, (key, layer) in enumerate(layers):
        form = [*_form(layer), *(("", "of the list", each[at]) for each in by_layer)]
        if any(id(each) in shared for each in (*layer.modules(), *layer.parameters())):
            form.append(("", "shared", layer))
        now = int(key), form
        is_next = before is not None and now[0] == before[0] + 1 and _is_alike(before, now)
        run = replace(run if is_next else Run(name, now[0], 0), behind=len(layers) - at - 1)
        run = replace(run, count=run.count + 1)
        best, before = max(best, run, key=lambda each: each.count), now
    return best


def _shared(model: nn.Module) -> set[int]:
    """Modules and parameters that are in several places."""
    places = Counter(
        id(each)
        for owner in model.modules()
        for each in (*owner._modules.values(), *owner._parameters.values())
        if each is not None
    )
    return {key for key, count in places.items() if count > 1}


Form = list[tuple[str, str, Any]]
PLAIN = (bool, int, float, str, type(None), torch.dtype, tuple)


def _form(layer: nn.Module) -> Form:
    """All that makes a layer what it is, but for values: module, attribute, value."""
    found: Form = []
    for name, module in layer.named_modules():
        found.append((name, "class", type(module)))
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                found.append((name, key, (tensor.shape, tensor.dtype, tensor.requires_grad)))
        found += [(name, key, value) for key, value in vars(module).items() if isinstance(value, PLAIN)]
    return found


def _is_alike(a: tuple[int, Form], b: tuple[int, Form]) -> bool:
    """Whether two layers are the same but for their numbers."""

    def same(one: Any, other: Any) -> bool:
        if type(one) is int and type(other) is int and one - a[0] == other - b[0]:
            return True
        return bool(one == other)

    return len(a[1]) == len(b[1]) and all(
        x[:2] == y[:2] and same(x[2], y[2]) for x, y in zip(a[1], b[1], strict=True)
    )
