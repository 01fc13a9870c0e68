"""Binding: which places of a module tree a slot stands for, and what is put there."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from flatfsdp.flat.binding import Binding
from flatfsdp.flat.flatten_params import FlattenParamsWrapper
from flatfsdp.flat.sites import parameter_sites


def tied_model() -> nn.Module:
    model = nn.Module()
    model.embedding = nn.Embedding(5, 4)
    model.head = nn.Linear(4, 5)
    model.head.weight = model.embedding.weight
    return model


def stand_ins(binding: Binding) -> list[torch.Tensor]:
    return [torch.randn(slot.shape) for slot in binding.layout.slots]


def test_a_tied_parameter_is_one_slot_with_all_its_sites():
    model = tied_model()
    binding = Binding.of(model, model.parameters())
    assert [slot.name for slot in binding.layout.slots] == ["embedding.weight", "head.bias"]
    assert [[site.name for site in sites] for sites in binding.sites] == [
        ["embedding.weight", "head.weight"],
        ["head.bias"],
    ]


def test_slots_follow_the_given_order_and_only_the_given_parameters():
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4))
    binding = Binding.of(model, [model[1].bias, model[0].weight, model[1].bias])
    assert [(slot.name, slot.shape) for slot in binding.layout.slots] == [
        ("1.bias", (4,)),
        ("0.weight", (3, 2)),
    ]


def test_a_submodule_with_two_paths_has_both_state_dict_keys():
    shared = nn.Linear(2, 2)
    model = nn.ModuleDict({"a": shared, "b": shared})
    binding = Binding.of(model, model.parameters())
    names = {site.name for sites in binding.sites for site in sites}
    assert names == set(model.state_dict())


def test_names_are_state_dict_keys_also_through_wrappers():
    inner = FlattenParamsWrapper(nn.Linear(2, 2), [])
    model = nn.Sequential(inner, nn.ModuleDict({"module": nn.Linear(2, 2)}))
    assert [site.name for site, _ in parameter_sites(model)] == list(model.state_dict())


def test_bound_tensors_are_attributes_at_every_site_and_not_parameters():
    model = tied_model()
    binding = Binding.of(model, model.parameters())
    weight, bias = stand_ins(binding)
    binding.bind([weight, bias])
    assert model.embedding.weight is weight
    assert model.head.weight is weight
    assert model.head.bias is bias
    assert list(model.parameters()) == []


def test_a_bound_parameter_keeps_its_identity_and_is_not_registered():
    """Leaves stay the same objects (design rule 1), and the optimizer must not see them."""
    model = nn.Linear(3, 2)
    originals = [model.weight, model.bias]
    binding = Binding.of(model, originals)
    binding.bind(originals)
    assert model.weight is originals[0]
    assert model.bias is originals[1]
    assert list(model.parameters()) == []
    model(torch.ones(1, 3)).sum().backward()
    assert torch.equal(originals[0].grad, torch.ones(2, 3))


def test_register_makes_real_parameters_at_every_site():
    model = tied_model()
    binding = Binding.of(model, model.parameters())
    binding.bind(stand_ins(binding))
    new = [nn.Parameter(tensor) for tensor in stand_ins(binding)]
    binding.register(new)
    assert binding.parameters() == new
    assert list(model.parameters()) == new
    assert model.head.weight is model.embedding.weight


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
def test_register_restores_the_order_of_state_dict_keys(order):
    """Also when a group lists bias before weight, and when two bindings share a module."""
    model = nn.Linear(3, 2)
    keys, parameters = list(model.state_dict()), list(model.parameters())
    bindings = [Binding.of(model, [parameters[i]]) for i in order]
    for binding in bindings:
        binding.bind(stand_ins(binding))
    for binding in bindings:
        binding.register([nn.Parameter(tensor) for tensor in stand_ins(binding)])
    assert list(model.state_dict()) == keys


@pytest.mark.parametrize("as_leaves", [False, True])
def test_an_lstm_computes_with_what_is_bound(as_leaves):
    """It reads its weights from a list of its own, and would move them if its references were out of date."""
    torch.manual_seed(0)
    reference, model = nn.LSTM(3, 4, num_layers=2), nn.LSTM(3, 4, num_layers=2)
    binding = Binding.of(model, model.parameters())
    values = [parameter.detach().clone() for parameter in reference.parameters()]
    tensors = [nn.Parameter(value) for value in values] if as_leaves else values
    binding.bind(tensors)
    x = torch.randn(5, 2, 3)
    assert not model._weights_have_changed()
    assert all(a is b for a, b in zip(model._flat_weights, tensors, strict=True))
    assert torch.equal(model(x)[0], reference(x)[0])
    new = [nn.Parameter(torch.zeros_like(value)) for value in values]
    binding.register(new)
    assert not model._weights_have_changed()
    assert torch.equal(model(x)[0], torch.zeros(5, 2, 4))


def test_multihead_attention_computes_with_what_is_bound():
    torch.manual_seed(0)
    reference, model = nn.MultiheadAttention(8, 2), nn.MultiheadAttention(8, 2)
    binding = Binding.of(model, model.parameters())
    binding.bind([parameter.detach() for parameter in reference.parameters()])
    x = torch.randn(5, 2, 8)
    assert torch.equal(model(x, x, x)[0], reference(x, x, x)[0])


def test_a_parameter_from_elsewhere_is_rejected_before_anything_changes():
    model = nn.Linear(3, 2)
    with pytest.raises(ValueError, match=r"shape \(7, 3\) is not registered below Linear"):
        Binding.of(model, [model.weight, nn.Linear(3, 7).weight])
    assert len(list(model.parameters())) == 2


def test_bind_wants_one_tensor_per_slot():
    model = nn.Linear(3, 2)
    binding = Binding.of(model, model.parameters())
    with pytest.raises(ValueError, match="shorter"):
        binding.bind([torch.zeros(2, 3)])
