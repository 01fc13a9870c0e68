"""Whatever changes between two microbatches of a step, the next one is not replayed as if nothing had."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatfsdp import microbatches, replayed
from flatfsdp.engine.whole.units import named_groups
from flatfsdp.fp8 import autocast, count_overflows
from flatfsdp.fp8.delayed_scaling import Scaling
from flatfsdp.fp8.overflows import Countable
from flatfsdp.optim import AdamW
from tests.support.fp8_layers import SHORT
from tests.support.ranks import on_ranks
from tests.support.replaying.cases import Case, batch
from tests.support.tape import taped

MICROBATCHES = 4
CHANGED = 2
"""Index of the microbatch before which something changes; the ones around it are middle ones, too."""

Change = Callable[[Any], Any]
"""Changes something about a model; a context manager, such as a hook's handle, undoes it after the next
microbatch."""


class Mirror(nn.Module):
    """A module whose mode is that of something else, as that of a compiled module is."""

    is_on = True

    @property
    def training(self) -> bool:  # type: ignore[override]
        return self.is_on

    @training.setter
    def training(self, value: bool) -> None:
        pass

    def forward(self, x: Tensor) -> Tensor:
        return x


def linear(model: Any) -> nn.Module:
    """A module deep inside that has parameters."""
    return next(each for each in model.modules() if isinstance(each, nn.Linear))


def first_parameter(model: Any) -> nn.Parameter:
    return next(iter(model.parameters()))


@contextmanager
def mode_of_one_module(model: Any) -> Iterator[None]:
    linear(model).training = False
    yield
    linear(model).training = True


def mode_of_a_class(model: Any) -> None:
    model.get_submodule("mirror").is_on = False


def a_hook(register: str) -> Change:
    def change(model: Any) -> Any:
        return getattr(linear(model), register)(lambda *_: None)

    change.__name__ = register
    return change


def recordable_hook(model: Any) -> Any:
    """The hook of gradient checkpointing may be recorded, but what was recorded before is without it."""

    def make_inputs_require_grads(_module: object, _args: object, output: Tensor) -> None:
        output.requires_grad_()

    make_inputs_require_grads.__module__ = "transformers.modeling_utils"
    return linear(model).register_forward_hook(make_inputs_require_grads)


def hook_of_no_module(model: Any) -> Any:
    names: dict[str, Any] = {}
    exec("def hook(*_): pass", {"__name__": None}, names)
    return linear(model).register_forward_hook(names["hook"])


def hook_for_all_modules(_model: Any) -> Any:
    return nn.modules.module.register_module_forward_hook(lambda *_: None)


@contextmanager
def hook_in_the_dict(model: Any) -> Iterator[None]:
    linear(model)._forward_hooks[-1] = lambda *_: None
    yield
    del linear(model)._forward_hooks[-1]


def other_buffer(model: Any) -> None:
    model.get_submodule("").counter = torch.zeros(3)


def other_memory_of_a_buffer(model: Any) -> None:
    model.counter.data = torch.zeros(3)


def other_shape_of_a_buffer(model: Any) -> None:
    model.counter.resize_(1)


def gradients_set_to_none(model: Any) -> None:
    AdamW(model.parameters()).zero_grad()


def gradients_zeroed(model: Any) -> None:
    AdamW(model.parameters()).zero_grad(set_to_none=False)


def one_gradient_taken_away(model: Any) -> None:
    first_parameter(model).grad = None


def gradients_kept_by_somebody_and_taken_away(model: Any) -> Any:
    kept = [parameter.grad for parameter in model.parameters()]
    gradients_set_to_none(model)
    return nullcontext(kept)


def write_in_place(model: Any) -> None:
    with torch.no_grad():
        first_parameter(model).mul_(1)


def load(model: Any) -> None:
    model.load_state_dict(model.state_dict())


def load_on_another_rank(model: Any) -> None:
    named_groups(model)[0][1].master.count_load()


def values_expired(model: Any) -> None:
    named_groups(model)[0][1].compute_shard.expire()


def other_memory_of_a_shard(model: Any) -> None:
    flat = named_groups(model)[0][1].master.flat
    flat.data = flat.data.clone()


def other_memory_of_a_compute_shard(model: Any) -> None:
    tensor = named_groups(model)[0][1].compute_shard.tensor
    storage, kept, others = tensor.untyped_storage(), tensor.clone(), []
    address, nbytes = storage.data_ptr(), storage.nbytes()
    while storage.data_ptr() == address:
        storage.resize_(0)
        # Takes the memory that has just become free.
        others.append(torch.empty(nbytes, dtype=torch.uint8))
        storage.resize_(nbytes)
    tensor.data.copy_(kept)


def frozen(model: Any) -> None:
    named_groups(model)[0][1].master.parameters[0].requires_grad_(False)


@contextmanager
def whole_parameters(model: Any) -> Iterator[None]:
    with model.summon_full_params():
        pass
    yield


def evaluation(model: Any) -> None:
    with torch.no_grad():
        model(batch(0, 0, 0))


def failed_forward(model: Any) -> None:
    with pytest.raises(RuntimeError):
        model(torch.zeros(1, 1))


def switched(name: str, switch: Callable[[bool], object]) -> Change:
    """Something that is on for one microbatch, whatever the model."""

    @contextmanager
    def change(_model: Any) -> Iterator[None]:
        switch(True)
        yield
        switch(False)

    change.__name__ = name
    return change


def fp8_region(_model: Any) -> AbstractContextManager[object]:
    return autocast(recipe=SHORT)


def counted_overflows(model: Any) -> AbstractContextManager[object]:
    return count_overflows(model)


CHANGES: list[Change] = [
    mode_of_one_module,
    mode_of_a_class,
    *(
        a_hook(f"register_{kind}")
        for kind in ("forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook")
    ),
    hook_in_the_dict,
    recordable_hook,
    hook_of_no_module,
    hook_for_all_modules,
    other_buffer,
    other_memory_of_a_buffer,
    other_shape_of_a_buffer,
    switched("deterministic", torch.use_deterministic_algorithms),
    switched("tf32", partial(setattr, torch.backends.cuda.matmul, "allow_tf32")),
    # `torch.autocast` switches itself off without a GPU.
    switched("torch_autocast", partial(torch.set_autocast_enabled, "cuda")),
    fp8_region,
]
OF_SHARDS: list[Change] = [
    gradients_set_to_none,
    gradients_zeroed,
    one_gradient_taken_away,
    gradients_kept_by_somebody_and_taken_away,
    write_in_place,
    load,
    load_on_another_rank,
    values_expired,
    other_memory_of_a_shard,
    other_memory_of_a_compute_shard,
    frozen,
    evaluation,
    failed_forward,
    whole_parameters,
]
"""Changes of what ZeRO-2 keeps in another state than ZeRO-3: gathered weights, and gradients."""


def is_replayed_after(change: Change, case: Case, rank: int) -> bool:
    """Whether a middle microbatch is replayed after this change, and not eager, or refused."""
    torch.manual_seed(rank)
    with taped():
        model = case.model()
        model.register_buffer("counter", torch.zeros(2))
        model.add_module("mirror", Mirror())
        step, optimizer = replayed(model, case.microbatch(model)), AdamW(model.parameters(), lr=1e-2)
        for index in range(2):
            for x in microbatches(model, [batch(rank, index, m) for m in range(MICROBATCHES)]):
                step(x)
            optimizer.step()
            optimizer.zero_grad()
        for m, x in enumerate(microbatches(model, [batch(rank, 9, m) for m in range(MICROBATCHES)])):
            before = step.replays
            if m == CHANGED:
                undone = change(model)
                with undone or nullcontext(), suppress(RuntimeError):
                    step(x)
                return step.replays > before
            step(x)
            # The first microbatch of a step may be eager, after another kind of step.
            assert m == 0 or step.replays == before + 1
    raise AssertionError("unreachable")


@pytest.mark.parametrize("reshard", [True, False], ids=["ZeRO-3", "ZeRO-2"])
@on_ranks(2)
def test_changes_between_microbatches_are_noticed(rank: int, reshard: bool) -> None:
    changes = [*CHANGES, *OF_SHARDS] if reshard else OF_SHARDS
    case = Case("", reshard, MICROBATCHES)
    assert is_replayed_after(lambda _: None, case, rank)
    unnoticed = [change.__name__ for change in changes if is_replayed_after(change, case, rank)]
    assert not unnoticed


@on_ranks(2)
def test_counts_of_overflows_are_noticed(rank: int) -> None:
    case = Case("", True, MICROBATCHES, SHORT)
    assert is_replayed_after(lambda _: None, case, rank)
    assert not is_replayed_after(counted_overflows, case, rank)


@on_ranks(2)
def test_scales_that_are_gone_are_noticed(rank: int) -> None:
    def change(model: Any, of_one: Callable[[Scaling], None]) -> None:
        layer = next(each for each in model.modules() if isinstance(each, Countable))
        of_one(layer._scalings["forward"])

    def forget(scaling: Scaling) -> None:
        scaling.has_scales = False

    case = Case("", True, MICROBATCHES, SHORT)
    assert not is_replayed_after(partial(change, of_one=forget), case, rank)
    # The buffers tell that they are still there.
    assert is_replayed_after(partial(change, of_one=Scaling.reread), case, rank)
