"""`replayed`: runs a microbatch eagerly at first, and as a CUDA graph from then on.

In:   a sharded model, and a function that runs forward and backward of one microbatch.
Out:  a function that computes the same bits, in a fraction of the host's time.
Next: `recording.py` records; `preconditions.py` tells when a recording is stale.

    eager, twice --> recorded, and run --> replayed ... --> replayed
                                 facts changed: eager again --^

The first, a middle and the last microbatch of a step launch different kernels, and so do other shapes: each
has a recording of its own (`Root.place`).  Gradients and parameters that pass from one to the next are at
fixed addresses; what the host knows of them are the `GroupFacts` of each group.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from flatfsdp.comm.checking.identity import Action, Identity
from flatfsdp.comm.checking.journal import declare
from flatfsdp.comm.cuda_graphs import Graphs, RandomMoves, graphs_on
from flatfsdp.contract.transparent import unwrapped
from flatfsdp.engine.replay.preconditions import Facts, Surroundings
from flatfsdp.engine.replay.recording import Outputs, Recording, Run, autograds_of
from flatfsdp.engine.step.root import Root
from flatfsdp.engine.storage.master import KeptGrad
from flatfsdp.engine.whole.units import UnitModule, root_of, units_in
from flatfsdp.flat.nested import described
from flatfsdp.fp8.delayed_scaling import Scaling
from flatfsdp.torch_private import call_before_shutdown

logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

WARM_UP = 2
"""Number of eager microbatches of a kind and shape, with the same facts, before one is recorded."""

MOST_RECORDINGS = 24
"""Largest number of recordings: three kinds of eight shapes, or of one shape all that lanes in blocks have.
The least recently used one makes room."""


def replayed(model: nn.Module, microbatch: Callable[P, R]) -> Replayed[P, R]:
    """Runs microbatches as CUDA graphs: the host launches each with one call.

        def microbatch(tokens, targets):
            loss = model(tokens, targets)
            loss.backward()
            return loss

        step = replayed(model, microbatch)
        for tokens, targets in microbatches(model, batches):
            loss = step(tokens, targets)
        optimizer.step()

    Each kind of microbatch (first, middle, last of a step) runs eagerly twice, is then recorded, and from
    then on replayed, with the bits of an eager one.  It runs eagerly and is recorded again when something
    that it depends on changes: an input's shape, training mode, a loaded checkpoint, a scaling recipe around
    the call.  Forwards outside of the function, such as evaluations, are eager.  On CPU everything is eager.

    The function runs one forward and one backward.  Python code in it is not repeated: it must compute from
    its arguments and the model alone, must not wait for the GPU, and must keep no tensor.  Tensor arguments
    are moved to the model's device.  Numbers and strings select the recording, so a number that changes in
    every call is never replayed.  After replacing a submodule, call `replayed` again.

    Args:
        model: the outermost unit, or a wrapper around it.
        microbatch: function that runs forward and backward, and returns detached tensors (or a nest of them).

    Returns:
        A function with the same arguments and results.

    Raises:
        TypeError: if the model is not a unit.
        ValueError: if it has settings that cannot be recorded: `optimize_backward_concat=False`,
            `cpu_offload`, tensor parallelism.
    """
    return Replayed(model, microbatch)


Key = tuple[Hashable, Hashable]
"""Key of a recording: the place of the microbatch in its step, and its arguments as `described` has them."""


@dataclass
class _Seen:
    """State of one key that has been used.

    Attributes:
        facts: facts at its last eager run.
        times: number of eager runs in a row before that, with the same facts.
        recording: the recording.
        outputs: structure of the function's result, a `TreeSpec`.
        scalings: FP8 scales that its eager runs have updated; a recording may not be the first to do so.
        moves: what its last eager run did to the random state.
        why_not: reason why it cannot be recorded, as its last eager run has shown; None if it can.
    """

    facts: Facts = ()
    times: int = 0
    recording: Recording | None = None
    outputs: Any = None
    scalings: Sequence[Scaling] = ()
    moves: RandomMoves = field(default_factory=RandomMoves)
    why_not: str | None = None


class Replayed(Generic[P, R]):
    """A function that runs microbatches, eagerly or as CUDA graphs; made by `replayed`.

    Attributes:
        replays: number of microbatches replayed so far.
        calls: number of all microbatches so far, replayed or not; evaluations do not count.
    """

    def __init__(self, model: nn.Module, microbatch: Callable[P, R]) -> None:
        self._model = _checked(model)
        self._microbatch = microbatch
        self._seen: OrderedDict[Key, _Seen] = OrderedDict()
        self._surroundings: Surroundings | None = None
        self._said: set[str] = set()
        self._numbers: dict[Key, int] = {}
        self._graphs = graphs_on(self._model.fsdp_state.shared.device)
        self._has_sums = False
        self.replays = self.calls = 0

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Runs one microbatch, as a CUDA graph where there is a recording of it."""
        self.calls += torch.is_grad_enabled()
        if self._graphs is None or not torch.is_grad_enabled():
            return self._microbatch(*args, **kwargs)
        root = root_of(self._model)
        if root.in_forward:
            raise RuntimeError("a replayed microbatch inside a forward of the model")
        # Before the kind is known: what a loop has left behind is of a step that has ended.
        root.microbatch.drop_left()
        root.microbatch.require_place()
        tensors: list[Tensor] = []
        arguments = described((args, kwargs), tensors)
        if any(tensor.requires_grad for tensor in tensors):
            raise ValueError(
                "an argument of a replayed microbatch requires a gradient; replays compute none: detach it"
            )
        key = root.place, arguments
        self._has_sums |= root.microbatch.index > 0 or not root.microbatch.is_last
        seen = self._seen.get(key)
        if seen is None:
            # Arguments that change in every call would pile up for good.
            self._make_room(are_recorded=False)
            seen = self._seen[key] = _Seen()
        self._seen.move_to_end(key)
        with self._graphs.beside():
            outputs = self._run(self._graphs, root, key, seen, (args, kwargs), tensors)
        results: R = tree_unflatten(outputs, seen.outputs)
        return results

    def release(self) -> None:
        """Frees all recordings; microbatches are eager again until they are recorded anew."""
        for seen in self._seen.values():
            if seen.recording is not None:
                seen.recording.graph.reset()
        self._seen.clear()

    def _run(
        self, graphs: Graphs, root: Root, key: Key, seen: _Seen, arguments: Any, tensors: list[Tensor]
    ) -> Outputs:
        surroundings = self._surroundings or self._prepare(root, graphs)
        # Before the facts are taken: what a user has frozen, unfrozen or zeroed becomes one only by this
        # look.
        if root.microbatch.index == 0:
            root.look_at_user()
            root.follow_user()
        else:
            # Other changes by users between microbatches are noticed in the next step.
            root.look_at_ranks()
            if not surroundings.markers_are_in_place:
                for group in root.groups:
                    group.drop_if_zeroed()
        # Asked first: it sorts hooks that have changed, and the facts are those of the sorted ones.
        reason = surroundings.why_not() or seen.why_not
        facts = surroundings.facts()
        if reason is not None and reason not in self._said:
            self._said.add(reason)
            logger.warning("microbatches are run eagerly, not replayed: %s", reason)
        if reason is None and seen.recording is not None and seen.recording.facts == facts:
            # Found equal faster the next time, if these are the same objects then.
            seen.recording.facts = facts
            # Before the launch, because recorded collectives carry no numbers: a rank that runs eagerly
            # instead would otherwise meet them unnoticed.
            _begin(root, seen.recording.state.scalings, Action.REPLAY, self._number(key))
            self.replays += 1
            # Facts that change now and then are not worth a recording.
            seen.facts, seen.times = (), 0
            return seen.recording.replay(tensors)
        # From here on the microbatch runs, eagerly or in a capture, and writes where replays will write.
        keep_addresses(root, of_sums=self._has_sums)
        # Taken again: addresses that have just been fixed are facts.
        facts = surroundings.facts()
        seen.times = seen.times + 1 if seen.facts == facts else 0
        seen.facts = facts
        run = partial(self._call, arguments, seen)
        if reason is None and seen.times >= WARM_UP:
            _begin(root, seen.scalings, Action.REPLAY, self._number(key))
            return self._record(graphs, surroundings, seen, run, tensors)
        _begin(root, (), Action.MICROBATCH, 0)
        inputs = [each.to(root.shared.device, non_blocking=True) for each in tensors]
        from_autograd = autograds_of(root)
        with graphs.watched() as moves:
            outputs = run(inputs)
        seen.why_not = "the microbatch sets a random seed, which replays would not" if moves.reseeds else None
        if autograds_of(root) != from_autograd:
            seen.why_not = "a penalty on model.parameters() adds gradients beside those that are reduced"
        # A recording repeats what the random state went through, so two eager runs have to agree on it.
        if moves != seen.moves:
            seen.moves, seen.times = moves, 0
        seen.scalings = root.shared.scales.noted
        surroundings.renew()
        return outputs

    def _prepare(self, root: Root, graphs: Graphs) -> Surroundings:
        """Prepares the model for recordings, when it is first used."""
        self._surroundings = Surroundings(root, self._model)
        root.pools.add(graphs)
        for ranks in root.identity.communicators:
            # NCCL's wait for the graphs that launch their collectives: `destroy_process_group()` would never
            # return.
            if ranks.group is not None:
                call_before_shutdown(ranks.group, self.release, also_at_exit=True)
        for group in root.groups:
            # Nodes that serve all forwards: their backward runs on the stream that made them.
            group.params.remake_packs()
        return self._surroundings

    def _record(
        self, graphs: Graphs, surroundings: Surroundings, seen: _Seen, run: Run, tensors: list[Tensor]
    ) -> Outputs:
        # First, so that their memory is in the pool again when the capture takes from it.
        seen.recording = None
        self._make_room(are_recorded=True)
        device = surroundings.root.shared.device
        inputs = [torch.empty_like(each, device=device).copy_(each) for each in tensors]
        try:
            recording = Recording(graphs, surroundings, run, inputs, seen.moves)
        except BaseException:
            # The random numbers of all recordings are out of step now.
            self._seen.clear()
            raise
        outputs = recording.replay(inputs, is_first=True)
        seen.recording, recording.facts = recording, seen.facts
        recordings = [each.recording for each in self._seen.values() if each.recording is not None]
        held = [each for one in recordings for each in one.outputs if isinstance(each, Tensor)]
        graphs.require_nothing_kept(held)
        return outputs

    def _call(self, arguments: Any, seen: _Seen, inputs: Sequence[Tensor]) -> Outputs:
        """Runs the function with these tensors among its arguments; returns its results, detached."""
        remaining = iter(inputs)
        args, kwargs = tree_map_only(Tensor, lambda _: next(remaining), arguments)
        found, seen.outputs = tree_flatten(self._microbatch(*args, **kwargs))
        return [each.detach() if isinstance(each, Tensor) else each for each in found]

    def _number(self, key: Key) -> int:
        """Number of the recording; ranks that record in different orders disagree on it, and raise."""
        return self._numbers.setdefault(key, len(self._numbers))

    def _make_room(self, *, are_recorded: bool) -> None:
        """Drops the key that was not used for the longest time, of the recorded or of the other ones."""
        keys = [key for key, seen in self._seen.items() if (seen.recording is not None) is are_recorded]
        if len(keys) >= MOST_RECORDINGS:
            del self._seen[keys[0]]


def keep_addresses(root: Root, *, of_sums: bool) -> None:
    """Fixes, for good, the addresses of what passes from one microbatch to the next.

    Args:
        of_sums: whether gradients pass, too: steps have more than one microbatch.
    """
    left = {group for groups in root.reducer.left for group in groups}
    for group in root.groups:
        if group.main_grad is not None:
            group.kept_grad = group.kept_grad or KeptGrad(group.master)
            if of_sums:
                group.keep_sums()
                # Otherwise it lives within one microbatch, in the graph's pool.
                if not root.shared.reduces_every or group in left:
                    group.main_grad.stay()
        if not group.unit.policy.reshard_after_forward:
            for buffer in (group.buffer, group.operands.columnwise):
                if buffer is not None:
                    buffer.stay()


def _begin(root: Root, scalings: Sequence[Scaling], action: Action, number: int) -> None:
    """Does what an eager, a recorded and a replayed microbatch have in common first.  Collective.

    Args:
        scalings: FP8 scales that it updates.
        action: which of the three it is, for the check against other ranks.
        number: number of the recording, the same on all ranks.
    """
    microbatch, scales = root.microbatch, root.shared.scales
    is_first, reduces = microbatch.index == 0, root.reduces
    # Under ZeRO-2, ranks may have different numbers of microbatches between.
    launches = is_first or reduces or any(unit.policy.reshard_after_forward for unit in root.units)
    if launches and root.is_checked:
        identity = Identity(action, root.identity, number, microbatch.steps_reduced, microbatch.index)
        # Others, which do not reduce, only gather.
        for ranks in root.identity.data_parallel if reduces else root.gather_ranks:
            declare(ranks, identity, root.shared.device)
    if is_first:
        root.begin_scales()
        scales.end_forward()
    # Later microbatches may use layers that the first did not.
    scales.note_all(scalings)


def _checked(model: nn.Module) -> UnitModule:
    outermost = unwrapped(model)
    if not isinstance(outermost, UnitModule):
        raise TypeError(f"this {type(model).__name__} is not sharded; shard or wrap it first")
    for _, unit in units_in(outermost):
        policy = unit.fsdp_state.policy
        refused = {
            "optimize_backward_concat=False": not policy.optimize_backward_concat,
            "cpu_offload": policy.cpu_offload,
            "tp_group": unit.fsdp_state.grid.tensor.size > 1,
        }
        if name := next((name for name, is_set in refused.items() if is_set), None):
            raise ValueError(f"a model with {name} cannot be replayed yet; train it without replayed")
    return outermost
