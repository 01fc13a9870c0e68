"""Small models that the wrapper tests wrap, train and compare; all take a batch of token ids."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from flatfsdp.flat.flatten_params import FlattenParamsWrapper


class TiedLM(nn.Module):
    """Embedding, norm with a buffer, MLP, head tied to the embedding; `unused` never gets a gradient."""

    def __init__(self, dim: int = 6) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, dim)
        self.norm = nn.BatchNorm1d(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 9), nn.GELU(), nn.Linear(9, dim, bias=False))
        self.head = nn.Linear(dim, 11)
        self.head.weight = self.embedding.weight
        self.unused = nn.Parameter(torch.randn(3))

    def forward(self, tokens):
        x = self.embedding(tokens)
        return self.head(x + self.mlp(self.norm(x)))


class LSTMModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 5)
        self.lstm = nn.LSTM(5, 6, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(12, 11)

    def forward(self, tokens):
        return self.head(self.lstm(self.embedding(tokens)[:, None])[0][:, 0])


class AttentionModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.attention = nn.MultiheadAttention(8, 2)
        self.head = nn.Linear(8, 11)

    def forward(self, tokens):
        x = self.embedding(tokens)
        return self.head(self.attention(x, x, x)[0])


MODELS = [TiedLM, LSTMModel, AttentionModel]


def build(factory=TiedLM, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return factory()


def two_groups(model: nn.Module) -> list[list[nn.Parameter]]:
    """All parameters, alternately in two groups and the second one backwards."""
    parameters = list(model.parameters())
    return [parameters[::2], parameters[1::2][::-1]]


def all_in_one(model: nn.Module) -> None:
    return None


def wrap_all(factory=TiedLM, groups=all_in_one, seed: int = 0) -> FlattenParamsWrapper:
    model = build(factory, seed)
    return FlattenParamsWrapper(model, groups(model))


def tokens(seed: int = 1) -> torch.Tensor:
    return torch.randint(0, 11, (7,), generator=torch.Generator().manual_seed(seed))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> list[torch.Tensor]:
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        batch = tokens(step)
        loss = F.cross_entropy(model(batch), batch.roll(1))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def assert_same_state(actual: dict, expected: dict) -> None:
    assert list(actual) == list(expected)
    for key, value in expected.items():
        assert actual[key].dtype == value.dtype, key
        assert torch.equal(actual[key], value), key


def snapshot(model: nn.Module) -> dict[str, torch.Tensor]:
    return {key: value.clone() for key, value in model.state_dict().items()}


def nest(model: nn.Module) -> nn.Module:
    """Wrappers in plain modules, in wrappers, and directly in each other."""
    model.mlp[0] = FlattenParamsWrapper(model.mlp[0], [model.mlp[0].weight])
    model.mlp = FlattenParamsWrapper(FlattenParamsWrapper(model.mlp, [model.mlp[2].weight]))
    return nn.Sequential(nn.Sequential(FlattenParamsWrapper(model)))
