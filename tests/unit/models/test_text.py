"""The data of the command line: real bytes, in a fixed order, split into reproducible batches."""

from pathlib import Path

import pytest
import torch

from flatfsdp.models import text as data
from flatfsdp.models.text import Sampler, load_corpus


def as_bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.tolist())


@pytest.fixture
def sampler() -> Sampler:
    text = bytes(range(256)) * 4
    return Sampler(torch.tensor(list(text), dtype=torch.uint8), batch=3, seq=16, seed=0)


def test_a_file_comes_back_byte_for_byte(tmp_path: Path) -> None:
    content = "naïve text\n".encode() + bytes(range(256))
    file = tmp_path / "text"
    file.write_bytes(content)
    assert as_bytes(load_corpus(file)) == content


def test_a_folder_is_read_in_sorted_order_without_hidden_files(tmp_path: Path) -> None:
    for name in ("b", "a", "sub/c", ".hidden", ".git/config"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"<{name}>")
    assert as_bytes(load_corpus(tmp_path)) == b"<a><b><sub/c>"


def test_the_limit_cuts_in_the_middle_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "PATH_LIMIT", 5)
    for name in ("a", "b", "c"):
        (tmp_path / name).write_text(name * 3)
    assert as_bytes(load_corpus(tmp_path)) == b"aaabb"


def test_the_default_is_python_source_and_no_tests() -> None:
    text = as_bytes(load_corpus(None))
    assert len(text) > 2**20
    assert b"\ndef " in text


def test_targets_are_the_next_bytes(sampler: Sampler) -> None:
    tokens_bt, targets_bt = sampler.sample(0, 0, 0)
    assert tokens_bt.shape == targets_bt.shape == (3, 16)
    assert tokens_bt.dtype == targets_bt.dtype == torch.int64
    assert torch.equal(tokens_bt[:, 1:], targets_bt[:, :-1])
    assert torch.equal((tokens_bt + 1) % 256, targets_bt)


def test_a_batch_depends_on_its_place_and_on_nothing_else(sampler: Sampler) -> None:
    first = sampler.sample(2, 1, 0)[0]
    sampler.sample(0, 0, 0)
    torch.manual_seed(5)
    assert torch.equal(sampler.sample(2, 1, 0)[0], first)
    for place in ((3, 1, 0), (2, 2, 0), (2, 1, 1), (1, 2, 0)):
        assert not torch.equal(sampler.sample(*place)[0], first)
    reseeded = Sampler(sampler.bytes_n, batch=3, seq=16, seed=1)
    assert not torch.equal(reseeded.sample(2, 1, 0)[0], first)


def test_a_numbered_window_depends_on_its_number_alone(sampler: Sampler) -> None:
    first, second = sampler.sample_from(0), sampler.sample_from(3)
    whole = Sampler(sampler.bytes_n, batch=6, seq=16, seed=0).sample_from(0)
    for some, others, all_six in zip(first, second, whole, strict=True):
        assert torch.equal(torch.cat([some, others]), all_six)
    assert len({tuple(row.tolist()) for row in whole[0]}) > 3
    assert torch.equal((whole[0] + 1) % 256, whole[1])


def test_the_shortest_corpus_has_one_window() -> None:
    tokens_bt, targets_bt = Sampler(torch.arange(9, dtype=torch.uint8), batch=1, seq=8, seed=0).sample(
        0, 0, 0
    )
    assert tokens_bt.tolist() == [list(range(8))]
    assert targets_bt.tolist() == [list(range(1, 9))]


def test_unusable_data_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "folder").mkdir()
    with pytest.raises(ValueError, match=r"nowhere does not exist"):
        load_corpus(tmp_path / "nowhere")
    for name in ("empty", "folder"):
        with pytest.raises(ValueError, match=rf"{name} holds no bytes"):
            load_corpus(tmp_path / name)
    with pytest.raises(ValueError, match="has 8 bytes, not 9"):
        Sampler(torch.zeros(8, dtype=torch.uint8), batch=1, seq=8, seed=0)
