"""fairscale's methods on one rank, without torch.distributed: states, errors, representations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatfsdp import param_groups
from flatfsdp.checkpoint import full_optimizer_state_dict
from flatfsdp.compat.fairscale import FSDP, TrainingState, get_fsdp_instances
from flatfsdp.engine.whole.units import named_groups
from tests.support.assertions import assert_raises


class Net(nn.Module):
    """Two units, a buffer, and a note of the state in forward and backward."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.first = FSDP(nn.Linear(3, 5), **options)
        self.second = nn.Linear(5, 2)
        self.register_buffer("scale", torch.full((1,), 1.0 + 2**-9))
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor, *rest: Tensor) -> Tensor:
        self.seen += [t.dtype for t in (x, *rest)]
        return self.second(self.first(x).relu())


MIXED: dict[str, Any] = {"mixed_precision": True, "compute_dtype": torch.bfloat16}


def model(**options: Any) -> FSDP:
    torch.manual_seed(0)
    return FSDP(Net(**options), **options)


def test_a_declared_instance_is_listed_as_not_collected() -> None:
    expert = FSDP(nn.Linear(2, 2), no_broadcast_optim_state=True)
    model = FSDP(nn.Sequential(expert, nn.Linear(2, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    shards = model.local_metadata_dict()["shards"]
    assert {key for key, about in shards.items() if about["no_broadcast_optim_state"]} == {"0.flat_param"}
    full = model.gather_full_optim_state_dict(optimizer)
    assert full is not None and full["uncollected_local_ids"] == [1]


def test_states_through_a_step() -> None:
    net = model()
    states: list[list[TrainingState]] = []

    def note(*_: Any) -> None:
        states.append([m.training_state for m in get_fsdp_instances(net)])

    note()
    net.module.first.module.register_forward_hook(note)
    out = net(torch.randn(4, 3))
    out.register_hook(note)
    out.sum().backward()
    with net.first.summon_full_params():
        note()
    note()
    idle, summoned = TrainingState.IDLE, TrainingState.SUMMON_FULL_PARAMS
    assert states[0] == states[4] == [idle, idle]
    assert states[1] == [TrainingState.FORWARD] * 2
    assert states[2] == [TrainingState.BACKWARD_PRE] * 2
    assert states[3] == [idle, summoned]


def test_calls_in_the_wrong_state_are_refused() -> None:
    net = model()
    with net.summon_full_params():
        for call in (
            lambda: net.no_sync().__enter__(),
            lambda: net.clip_grad_norm_(1.0),
            lambda: net.summon_full_params().__enter__(),
            lambda: net.set_gradient_divide_factors(1.0, 1.0, True),
            lambda: net.apply(lambda m: None),
            net.local_state_dict,
        ):
            assert_raises(ValueError, "SUMMON_FULL_PARAMS", call)
        assert_raises(RuntimeError, "summon_full_params", net, torch.randn(4, 3))
    net.assert_state([TrainingState.IDLE, TrainingState.FORWARD])


def test_what_only_the_root_can_do() -> None:
    net = model()
    net(torch.randn(4, 3)).sum().backward()
    with pytest.raises(AssertionError, match="root"):
        net.first.no_sync().__enter__()
    assert_raises(AssertionError, "root", net.first.clip_grad_norm_, 1.0)


def test_parameters_have_their_names_while_summoned() -> None:
    net = model()
    flats = dict(net.named_parameters())
    assert list(flats) == ["flat_param", "first.flat_param"]
    assert list(map(id, flats.values())) == [id(group.master.flat) for _, group in named_groups(net)]
    with net.summon_full_params():
        names = [name for name, _ in net.named_parameters()]
    assert sorted(names) == ["first.bias", "first.weight", "second.bias", "second.weight"]
    assert all(net.get_parameter(name) is flat for name, flat in flats.items())


def test_parts_of_a_flat_parameter_have_no_options_of_their_own() -> None:
    net = model()
    with pytest.raises(ValueError, match=r"lists one flat parameter.*shard the model with flatfsdp\.shard"):
        param_groups(net, [{"params": ["second.bias"], "weight_decay": 0.0}])


def test_a_flat_parameter_is_frozen_as_a_whole() -> None:
    net, x = model(optimize_backward_concat=True), torch.randn(4, 3)
    net(x)
    net.module.second.weight.requires_grad_(False)
    assert_raises(RuntimeError, r"parameter second\.weight was set to False by itself", net, x)
    net.module.second.weight.requires_grad_(True)
    net.first.requires_grad_(False)
    net(x).sum().backward()
    assert net.first.flat_param.grad is None and net.flat_param.grad.any()
    net.first.requires_grad_(True)
    net(x).sum().backward()
    assert net.first.flat_param.grad.any()


def test_a_flat_parameter_that_was_replaced_is_noticed() -> None:
    x = torch.randn(4, 3)
    net = model()
    zeros = {name: torch.zeros_like(flat) for name, flat in net.named_parameters()}
    with pytest.raises(RuntimeError, match="flat parameter of unit root was replaced"):
        torch.func.functional_call(net, zeros, (x,))
    net(x)
    net.first.flat_param = nn.Parameter(torch.zeros_like(net.first.flat_param))
    assert_raises(RuntimeError, "flat parameter of unit first was replaced", net, x)


def test_changes_stay_unless_volatile() -> None:
    net = model()
    for volatile in (True, False):
        with net.summon_full_params(volatile=volatile):
            net.second.weight.data.fill_(3.0)
        assert bool((net.state_dict()["second.weight"] == 3.0).all()) is not volatile


def test_apply_initialises_ordinary_parameters() -> None:
    net = model()
    shapes = []

    def initialise(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            shapes.append(tuple(module.weight.shape))
            nn.init.constant_(module.weight, 2.0)

    assert net.first.apply(initialise) is net.first
    assert net.apply(initialise) is net
    assert sorted(shapes) == [(2, 5), (5, 3), (5, 3)]
    assert all(bool((v == 2.0).all()) for k, v in net.state_dict().items() if k.endswith("weight"))


def test_reset_parameters_has_to_be_allowed() -> None:
    with pytest.raises(RuntimeError, match="allow_reset_parameters"):
        FSDP(nn.Linear(3, 3)).reset_parameters()
    layer = FSDP(nn.Linear(3, 3), allow_reset_parameters=True)
    before = layer.state_dict()["weight"]
    layer.reset_parameters()
    assert not torch.equal(layer.state_dict()["weight"], before)


class Resettable(nn.Sequential):
    def reset_parameters(self) -> None:
        for layer in self:
            layer.reset_parameters()


@pytest.mark.parametrize("recurse", [True, False])
@pytest.mark.parametrize("volatile", [True, False])
def test_parameters_are_reset_where_they_are_summoned(recurse: bool, volatile: bool) -> None:
    """fairscale allows only this; units below that are not summoned are summoned for the call."""
    inner = FSDP(nn.Linear(3, 3), allow_reset_parameters=True)
    outer = FSDP(Resettable(inner, nn.Linear(3, 3)), allow_reset_parameters=True)
    before = outer.state_dict()
    with outer.summon_full_params(recurse=recurse, volatile=volatile):
        outer.reset_parameters()
        assert not torch.equal(outer.module[1].weight, before["1.weight"])
        assert outer.training_state is TrainingState.SUMMON_FULL_PARAMS
    assert outer.training_state is inner.training_state is TrainingState.IDLE
    after = outer.state_dict()
    assert [torch.equal(after[name], value) for name, value in before.items()] == [volatile] * 4


def test_parameters_are_not_reset_in_a_backward() -> None:
    layer = FSDP(nn.Linear(3, 3), allow_reset_parameters=True)
    out = layer(torch.randn(2, 3))
    out.register_hook(lambda _: layer.reset_parameters())
    with pytest.raises(ValueError, match="needs state IDLE or SUMMON_FULL_PARAMS"):
        out.sum().backward()


def test_a_state_dict_is_a_copy_in_fp32() -> None:
    net = model(**MIXED)
    assert net.module.scale.dtype == torch.bfloat16
    saved = net.state_dict()
    assert {v.dtype for v in saved.values()} == {torch.float32}
    net.module.scale.zero_()
    with net.summon_full_params():
        net.second.weight.data.zero_()
    assert saved["scale"] == 1.0
    assert bool(saved["second.weight"].any())
    live = model()
    assert list(live.state_dict()) == list(saved)
    saved = live.state_dict()
    with live.summon_full_params():
        summoned = live.state_dict()
        live.second.weight.data.zero_()
    live.module.scale.zero_()
    assert bool(saved["scale"].all())
    assert torch.equal(summoned["second.weight"], saved["second.weight"])


def test_a_module_around_several_models_has_their_keys() -> None:
    parent = nn.ModuleDict({"a": model(), "b": nn.Linear(2, 2), "c": model(mixed_precision=True)})
    names = ["scale", "first.weight", "first.bias", "second.weight", "second.bias"]
    saved = parent.state_dict()
    expected = {f"{net}.{name}" for net in "ac" for name in names} | {"b.weight", "b.bias"}
    assert saved.keys() == expected
    assert {v.dtype for v in saved.values()} == {torch.float32}
    other = nn.ModuleDict({"a": model(), "b": nn.Linear(2, 2), "c": model(mixed_precision=True)})
    other.load_state_dict(saved)
    assert torch.equal(other["b"].weight, parent["b"].weight)


@pytest.mark.parametrize(
    ("options", "dtype"),
    [({}, torch.float32), (MIXED, torch.bfloat16), ({**MIXED, "cast_input": False}, torch.float32)],
)
def test_only_fp32_inputs_are_cast_and_only_in_mixed_precision(
    options: dict[str, Any], dtype: torch.dtype
) -> None:
    net = model(**options)
    x = torch.randn(4, 3)
    net.module.second.register_forward_pre_hook(lambda m, inputs: None)
    first = net.module.first.module
    first.register_forward_pre_hook(lambda m, inputs: (inputs[0].to(net.compute_dtype),))
    net(x, x.double(), x.bfloat16())
    assert net.module.seen == [dtype, torch.float64, torch.bfloat16]


def test_fp16_inputs_of_a_unit_can_be_cast_up() -> None:
    layer = FSDP(nn.Linear(3, 3), force_input_to_fp32=True)
    x = torch.randn(4, 3).half().requires_grad_()
    layer(x).sum().backward()
    assert x.grad is not None and x.grad.dtype == torch.float16


def test_attributes_of_the_arguments() -> None:
    net = model(**MIXED, move_params_to_cpu=True)
    assert (net.rank, net.world_size, net.process_group) == (0, 1, None)
    assert net.process_group_reduce_scatter is None
    assert (net.compute_dtype, net.buffer_dtype) == (torch.bfloat16, torch.bfloat16)
    assert net.cpu_offload and net.move_grads_to_cpu and net.mixed_precision
    assert net.gradient_predivide_factor == net.gradient_postdivide_factor == 1.0
    assert net._is_root is None
    net(torch.randn(2, 3))
    assert net._is_root and not net.first._is_root


def test_representation() -> None:
    assert "mixed_precision=False" in repr(model())
    assert "reshard_after_forward=True" in repr(model(verbose=True))


def test_an_optimizer_state_may_have_one_number_for_each_rank() -> None:
    """fairscale saves numbers other than "step" as a list of tensors without dimensions."""
    net = model()
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    full = net.gather_full_optim_state_dict(optimizer)
    assert full is not None
    for entry in full["state"].values():
        entry["scale"] = [torch.tensor(3.0), torch.tensor(4.0)]
    loaded = torch.optim.Adam(net.parameters())
    loaded.load_state_dict(net.get_shard_from_optim_state_dict(full))
    for ours, theirs in zip(optimizer.state.values(), loaded.state.values(), strict=True):
        assert theirs.pop("scale") == 3.0
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_instances() -> None:
    net = FSDP(nn.Sequential(model(), nn.ReLU()))
    assert len(get_fsdp_instances(net)) == 3
    assert get_fsdp_instances(net, skip_empty=True) == get_fsdp_instances(net)[1:]
    assert get_fsdp_instances(nn.Linear(2, 2)) == []


def test_a_parameter_belongs_to_one_unit() -> None:
    with pytest.raises(NotImplementedError, match="contains all modules that share it"):
        model().append_shared_param(nn.Parameter(torch.zeros(2)))


def test_names_of_one_flat_parameter_count_their_own_steps() -> None:
    """A plain optimizer keeps the tensors that it loads, and counts in them."""
    model = FSDP(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, foreach=False)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    states = full_optimizer_state_dict(model, optimizer)["state"]
    assert len(states) == 4 and len({id(state["step"]) for state in states.values()}) == 4
