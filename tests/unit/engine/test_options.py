"""The options of `shard`, `auto_wrap` and `FlatFSDP` are one type, and those of the engine."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from typing import Any, get_args, get_type_hints

import pytest
from torch import nn
from typing_extensions import Unpack

import flatfsdp
from flatfsdp import FlatFSDP, Options, auto_wrap, shard
from flatfsdp.options import Policy

HINTS = get_type_hints(Options)
WHERE = {"mesh", "dp_shard", "tp_group", "device", "param_init_fn", "sync_module_states"}
"""Options that say where a unit is and what it starts from, and are not kept."""


def test_the_options_are_the_policys_fields_and_where_a_unit_is() -> None:
    of_policy = {field.name for field in fields(Policy)}
    assert set(HINTS) == of_policy | WHERE and not of_policy & WHERE
    types = get_type_hints(Policy)
    for name in ("precision", "lanes"):
        assert set(get_args(types[name]) or [types[name]]) < set(get_args(HINTS[name]))
        del types[name]
    assert {name: HINTS[name] for name in types} == types


def test_each_option_is_documented() -> None:
    documented = Options.__doc__ or ""
    assert [name for name in HINTS if f"\n        {name}: " not in documented] == []


@pytest.mark.parametrize("door", [shard, auto_wrap, FlatFSDP.__init__])
def test_editors_see_the_options(door: Callable[..., Any]) -> None:
    assert get_type_hints(door, include_extras=True)["options"] == Unpack[Options]


def test_the_flag_is_on_by_default() -> None:
    for model in (shard(nn.Linear(2, 2)), FlatFSDP(nn.Linear(2, 2))):
        assert model.fsdp_state.policy.optimize_backward_concat


def test_what_users_need_is_at_the_top() -> None:
    assert all(hasattr(flatfsdp, name) for name in flatfsdp.__all__)
    assert "FlatLayout" not in flatfsdp.__all__ and "EMA" not in flatfsdp.__all__


STATE_DICTS = """
import torch.distributed.checkpoint.state_dict as state_dict
plain = state_dict._get_model_state_dict
import flatfsdp
from torch import nn
assert state_dict._get_model_state_dict is plain
model = flatfsdp.shard(nn.Linear(2, 2))
whole = state_dict.get_model_state_dict(model, options=state_dict.StateDictOptions(full_state_dict=True))
assert whole["weight"].shape == (2, 2)
assert state_dict._get_model_state_dict is not plain
"""


def test_an_import_leaves_torch_as_it_is() -> None:
    """Its state-dict functions know sharded models once one is built."""
    subprocess.run([sys.executable, "-c", STATE_DICTS], check=True, timeout=300)
