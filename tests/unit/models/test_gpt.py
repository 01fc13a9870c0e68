"""The GPT of the command line: causal, reproducible, and with an FP32 loss whatever it computes in."""

import math

import pytest
import torch

from flatfsdp.models.gpt import GPT, GPTConfig

CONFIG = GPTConfig(layers=2, hidden=32, heads=4, seq=16)


@pytest.fixture
def tokens_bt() -> torch.Tensor:
    return torch.randint(CONFIG.vocab, (2, CONFIG.seq), generator=torch.Generator().manual_seed(1))


def test_later_tokens_do_not_change_earlier_logits(tokens_bt: torch.Tensor) -> None:
    model = GPT(CONFIG)
    changed_bt = tokens_bt.clone()
    changed_bt[:, 9] = (changed_bt[:, 9] + 1) % CONFIG.vocab
    before, after = model(tokens_bt), model(changed_bt)
    torch.testing.assert_close(before[:, :9], after[:, :9])
    assert not torch.allclose(before[:, 9:], after[:, 9:])


def test_same_seed_same_parameters() -> None:
    torch.manual_seed(1)
    first = GPT(CONFIG, seed=3).state_dict()
    torch.manual_seed(2)  # the global generator has no say
    second, other = GPT(CONFIG, seed=3).state_dict(), GPT(CONFIG, seed=4).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["head.weight"], other["head.weight"])


def test_loss_is_fp32_cross_entropy_of_the_logits(tokens_bt: torch.Tensor) -> None:
    model = GPT(CONFIG).bfloat16()
    targets_bt = tokens_bt.roll(-1, dims=1)
    logits_btv = model(tokens_bt)
    loss = model(tokens_bt, targets_bt)
    assert logits_btv.dtype is torch.bfloat16
    assert loss.dtype is torch.float32
    expected = -logits_btv.double().log_softmax(-1).gather(-1, targets_bt[..., None]).mean()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)


def test_an_untrained_model_knows_nothing(tokens_bt: torch.Tensor) -> None:
    loss = GPT(CONFIG)(tokens_bt, tokens_bt.roll(-1, dims=1))
    assert loss.item() == pytest.approx(math.log(CONFIG.vocab), abs=0.3)


def test_every_parameter_gets_a_gradient(tokens_bt: torch.Tensor) -> None:
    model = GPT(CONFIG)
    model(tokens_bt, tokens_bt.roll(-1, dims=1)).backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []


@pytest.mark.parametrize("sizes", [{"hidden": 30}, {"layers": 0}, {"heads": 0}])
def test_impossible_sizes_are_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(sizes))):
        GPTConfig(**sizes)


def test_a_sequence_that_is_too_long_is_refused() -> None:
    with pytest.raises(ValueError, match="16 positions"):
        GPT(CONFIG)(torch.zeros(1, 17, dtype=torch.long))
