"""PyTorch's functions for state dicts, given a sharded model: whole tensors, or an error with the way out."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

from tests.support.checkpoints import Model, build, equal, full_state, trained
from tests.support.ranks import on_ranks

FULL = StateDictOptions(full_state_dict=True)
ON_RANK_0 = StateDictOptions(full_state_dict=True, cpu_offload=True)
FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def _trained(grouped: bool) -> tuple[Any, torch.optim.Optimizer]:
    model, optimizer = trained(1, grouped=grouped)
    return model, optimizer


@pytest.mark.parametrize("grouped", [True, False])
@on_ranks(2)
def test_whole_state_dicts_are_those_of_the_checkpoint_package(rank: int, grouped: bool) -> None:
    model, optimizer = _trained(grouped)
    expected = full_state(model, optimizer)
    assert equal(get_model_state_dict(model, options=FULL), expected["model"])
    assert equal(get_optimizer_state_dict(model, optimizer, options=FULL), expected["optimizer"])
    assert equal([*get_state_dict(model, optimizer, options=FULL)], [*expected.values()])
    assert list(expected["model"]) == list(Model().state_dict())


@on_ranks(2)
def test_with_offload_the_first_rank_alone_has_them(rank: int) -> None:
    model, optimizer = _trained(grouped=True)
    expected = full_state(model, optimizer)
    state = get_state_dict(model, optimizer, options=ON_RANK_0)
    assert equal([*state], [*expected.values()] if rank == 0 else [{}, {}])


@pytest.mark.parametrize("grouped", [True, False])
@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("options", [FULL, FROM_RANK_0], ids=["all ranks", "from rank 0"])
@on_ranks(2)
def test_loading_whole_state_dicts(rank: int, options: Any, together: bool, grouped: bool) -> None:
    expected = full_state(*_trained(grouped))
    model, optimizer = trained(0, seed=1, grouped=grouped)
    given: dict[str, Any] = expected
    if options.broadcast_from_rank0 and rank > 0:
        given = {"model": {}, "optimizer": {}}
    if together:
        given = {"model_state_dict": given["model"], "optim_state_dict": given["optimizer"]}
        set_state_dict(model, optimizer, **given, options=options)
    else:
        result = set_model_state_dict(model, given["model"], options=options)
        assert result == ([], [])
        set_optimizer_state_dict(model, optimizer, given["optimizer"], options=options)
    assert equal(full_state(model, optimizer), expected)


@pytest.mark.parametrize("from_rank0", [True, False])
@on_ranks(2)
def test_loading_names_what_is_missing(rank: int, from_rank0: bool) -> None:
    model = build(0)
    state = get_model_state_dict(model, options=FULL)
    del state["cube"]
    state["another"] = torch.zeros(2)
    state = state if rank == 0 or not from_rank0 else {}
    options: dict[str, Any] = {"full_state_dict": True, "broadcast_from_rank0": from_rank0}
    with pytest.raises(RuntimeError, match=r"[Mm]issing key.*cube"):
        set_model_state_dict(model, state, options=StateDictOptions(**options))
    result = set_model_state_dict(model, state, options=StateDictOptions(**options, strict=False))
    assert result == (["cube"], ["another"])


@on_ranks(2)
def test_shards_by_name_are_refused(rank: int) -> None:
    model, optimizer = _trained(False)
    state = full_state(model, optimizer)
    for ask in (
        partial(get_model_state_dict, model),
        partial(get_optimizer_state_dict, model, optimizer),
        partial(get_state_dict, nn.ModuleDict({"net": model}), optimizer),
        partial(set_model_state_dict, model, state["model"]),
        partial(set_optimizer_state_dict, model, optimizer, state["optimizer"]),
    ):
        with pytest.raises(ValueError, match=r"full_state_dict=True.*\.checkpoint\.save.*sharded_training_s"):
            ask()
    flattened = StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=True)
    with pytest.raises(ValueError, match="flatten_optimizer_state_dict"):
        get_optimizer_state_dict(model, optimizer, options=flattened)
    assert equal(full_state(model, optimizer), state)


@on_ranks(2)
def test_frozen_parameters_are_left_out(rank: int) -> None:
    options = StateDictOptions(full_state_dict=True, ignore_frozen_params=True)
    names = set(get_model_state_dict(build(0), options=options))
    assert set(Model().state_dict()) - names == {"frozen.weight", "frozen.bias"}


@on_ranks(2)
def test_compiled_models_have_the_names_of_plain_ones(rank: int) -> None:
    model, optimizer = _trained(grouped=False)
    expected = full_state(model, optimizer)
    other, other_optimizer = trained(0, seed=1)
    compiled = torch.compile(other, backend="eager")
    set_state_dict(
        compiled,
        other_optimizer,
        model_state_dict=expected["model"],
        optim_state_dict=expected["optimizer"],
        options=FULL,
    )
    assert equal([*get_state_dict(compiled, other_optimizer, options=FULL)], [*expected.values()])


@on_ranks(2)
def test_other_models_have_the_functions_of_pytorch(rank: int) -> None:
    get_model_state_dict(build(0), options=FULL)
    net = Model()
    optimizer = torch.optim.AdamW(net.parameters())
    model_state, optimizer_state = get_state_dict(net, optimizer)
    assert equal(model_state, net.state_dict())
    assert "cube" in optimizer_state["state"]
    set_state_dict(net, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
