"""Hugging Face's files are read into and written from sharded models, part by part, or refused."""

from __future__ import annotations

import ctypes
import json
import platform
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from flatfsdp import Precision, shard
from flatfsdp.compat.transformers import init_weights_of, load_hf, policy_of, save_hf
from tests.support.assertions import assert_raises
from tests.support.ecosystem.families import FAMILIES, Family, batches_of, needs_peft, needs_transformers
from tests.support.ecosystem.folders import shared_folder
from tests.support.ecosystem.fused import MODELS
from tests.support.ecosystem.training import assert_same_values, read
from tests.support.ranks import on_ranks

pytestmark = needs_transformers


def trained(family: Family, seed: int = 5) -> Any:
    """A plain model whose parameters all have distinct values."""
    model: Any = family.build()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn(parameter.shape, generator=generator)
    return model


def from_meta(family: Family, **options: Any) -> Any:
    with torch.device("meta"):
        model: Any = family.build()
    return shard(model, policy_of(model), device="cpu", param_init_fn=init_weights_of(model), **options)


def keys_in(folder: Path) -> set[str]:
    from safetensors import safe_open

    found: set[str] = set()
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            found |= set(file.keys())
    return found


@on_ranks(2)
def test_files_of_plain_transformers_are_read_and_written(rank: int) -> None:
    """Tied weights, experts with other names and shapes in files, one file and several."""
    families = {**FAMILIES, "Llama, fused": MODELS["Llama, fused"]}
    for number, (name, family) in enumerate(families.items()):
        plain = trained(family)
        size = "60KB" if number % 2 else "1GB"
        with shared_folder() as folder:
            if rank == 0:
                plain.save_pretrained(folder / "plain", max_shard_size=size)
            dist.barrier()
            model = from_meta(family)
            load_hf(model, folder / "plain")
            assert_same_values(model.state_dict(), plain.state_dict())
            save_hf(model, folder / "ours", max_shard_size=size)
            assert keys_in(folder / "ours") == keys_in(folder / "plain"), name
            configs = [json.loads((folder / each / "config.json").read_text()) for each in ("ours", "plain")]
            assert configs[0] == configs[1]
            one_file = size == "1GB"
            assert (folder / "ours" / "model.safetensors").exists() == one_file
            assert (folder / "ours" / "model.safetensors.index.json").exists() != one_file
            assert (folder / "ours" / "generation_config.json").exists() == plain.can_generate()
            assert_same_values(read(family, folder / "ours").state_dict(), plain.state_dict())


@on_ranks(2)
def test_sixteen_bits(rank: int) -> None:
    """BF16 files are loaded into a model that trains in FP32, and written back; other files are ignored."""
    family = FAMILIES["Llama"]
    plain = trained(family).bfloat16()
    model = shard(family.build(), family.is_unit, precision=Precision(compute=torch.bfloat16))
    with shared_folder() as folder:
        if rank == 0:
            plain.save_pretrained(folder)
            (folder / "consolidated.safetensors").write_bytes(b"of another format")
            (folder / "README.md").write_text("stays")
        dist.barrier()
        load_hf(model, folder)
        assert_same_values(model.state_dict(), plain.float().state_dict())
        save_hf(model, folder, dtype=torch.bfloat16, max_shard_size="30KB")
        assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
        names = {path.name for path in folder.iterdir()}
        assert {"README.md", "consolidated.safetensors", "model.safetensors.index.json"} < names
        assert not names & {"model.safetensors", ".unfinished-save"}
        found = read(family, folder, dtype="auto")
        assert found.dtype == torch.bfloat16
    inputs = batches_of(rank, 0)[0]
    with torch.no_grad():
        assert torch.equal(model.eval()(**inputs).logits, found.eval()(**inputs).logits)
    assert_same_values(found.float().state_dict(), plain.state_dict())


@on_ranks(2)
def test_what_does_not_fit_is_named_on_all_ranks(rank: int, world_size: int) -> None:
    family = FAMILIES["Llama"]
    model = shard(family.build(), family.is_unit)
    before = model.state_dict()
    sizes = {"hidden_size": 64}
    others = {
        r"missing: model\.layers\.1\..*, and 4 more": family.build(num_hidden_layers=1),
        r"unexpected: model\.layers\.2\.": family.build(num_hidden_layers=3),
        r"of another shape: lm_head\.weight \(\(64, 64\), here \(64, 32\)\)": family.build(**sizes),
        r"unexpected: .*q_norm": FAMILIES["Qwen3"].build(),
        r"model; missing: lm_head\.weight$": family.build().model,
    }
    with shared_folder() as folder:
        for number, (said, other) in enumerate(others.items()):
            if rank == 0:
                other.save_pretrained(folder / str(number))
            dist.barrier()
            assert_raises(ValueError, said, load_hf, model, folder / str(number))
        if rank == 0:
            for each in range(world_size):
                family.build().save_pretrained(folder / f"of rank {each}", max_shard_size="20KB")
        dist.barrier()
        own = folder / f"of rank {rank}"
        with pytest.raises(ValueError, match=r"ranks were given different paths: rank 0 .*of rank 0, rank 1"):
            load_hf(model, own)
        assert_raises(ValueError, r"ranks were given different paths", save_hf, model, own)
        path = next(own.glob("*.safetensors"))
        with pytest.MonkeyPatch.context() as patch:
            # The same path, on disks of their own.
            patch.chdir(own)
            if rank == 1:
                path.write_bytes(path.read_bytes()[:-8])
            assert_raises(ValueError, r"safetensors is damaged", load_hf, model, "")
            if rank == 1:
                path.unlink()
            with pytest.raises(FileNotFoundError):
                load_hf(model, "")
            for url in ("s3://bucket/model", "file:///model"):
                for given in (url, Path(url)):
                    assert_raises(ValueError, "is a URL", load_hf, model, given)
                    assert_raises(ValueError, "is a URL", save_hf, model, given)
                assert_raises((ValueError, RuntimeError), "is a URL", model.save_pretrained, url)
            assert not any(each.is_dir() for each in own.iterdir())
        with pytest.raises(FileNotFoundError, match=r"there is no folder .*snapshot_download"):
            load_hf(model, folder / "nothing")
    for each in (family.build(), model.model):
        with pytest.raises(ValueError, match=r"is not sharded as a whole; pass load_hf what flatfsdp\.shard"):
            load_hf(each, "nowhere")
    with pytest.raises(ValueError, match=r"dtype is torch\.int8; models are saved in 16 bits"):
        save_hf(model, "nowhere", dtype=torch.int8)
    with model.summon_full_params(), pytest.raises(RuntimeError, match="inside summon_full_params"):
        save_hf(model, "nowhere")
    assert_same_values(model.state_dict(), before)


@pytest.mark.parametrize("place", ["../outside/{}", "{root}/outside/{}", "below/../../outside/{}"])
@on_ranks(2)
def test_files_outside_of_the_folder_are_not_read(rank: int, tmp_path: Path, place: str) -> None:
    family = FAMILIES["Llama"]
    model = shard(family.build(), family.is_unit)
    before = model.state_dict()
    inside = tmp_path / "inside"
    if rank == 0:
        trained(family).save_pretrained(inside, max_shard_size="20KB")
        (tmp_path / "outside").mkdir()
        index = json.loads((inside / "model.safetensors.index.json").read_text())
        key, name = sorted(index["weight_map"].items())[-1]
        (tmp_path / "outside" / name).write_bytes((inside / name).read_bytes())
        index["weight_map"][key] = place.format(name, root=tmp_path)
        (inside / "model.safetensors.index.json").write_text(json.dumps(index))
    dist.barrier()
    with pytest.raises(ValueError, match=r"index\.json names a file outside of the folder: '.*outside/model"):
        load_hf(model, inside)
    assert_same_values(model.state_dict(), before)


@on_ranks(2)
def test_a_tied_model_needs_one_value(rank: int) -> None:
    """Files may contain a tied weight once, under either name, or twice with equal values."""
    from safetensors.torch import load_file, save_file

    family = FAMILIES["Qwen3"]
    plain = trained(family)
    model = shard(family.build(), family.is_unit)
    with shared_folder() as folder:
        if rank == 0:
            plain.save_pretrained(folder)
            values = load_file(folder / "model.safetensors")
            head = values["model.embed_tokens.weight"].clone()
            save_file({**values, "lm_head.weight": head}, folder / "model.safetensors")
        dist.barrier()
        load_hf(model, folder)
        assert_same_values(model.state_dict(), plain.state_dict())
        dist.barrier()
        if rank == 0:
            save_file({**values, "lm_head.weight": 2 * head}, folder / "model.safetensors")
        dist.barrier()
        with pytest.raises(ValueError, match=r"are one parameter in the model.*tie_word_embeddings=False"):
            load_hf(model, folder)


@on_ranks(2)
def test_a_save_that_fails_leaves_the_earlier_model(rank: int) -> None:
    family = FAMILIES["Llama"]
    model = shard(trained(family, seed=1), family.is_unit)
    first = model.state_dict()
    with shared_folder() as folder:
        save_hf(model, folder, max_shard_size="20KB")
        other = shard(trained(family, seed=2), family.is_unit)
        place = "flatfsdp.compat.transformers.files.folder"
        full = mock.patch(f"{place}.NewFiles.write", side_effect=OSError(28, "No space left on device"))
        with full, pytest.raises(OSError, match="No space left"):
            save_hf(other, folder, max_shard_size="20KB")
        assert_same_values(read(family, folder).state_dict(), first)
        # A crash before the last file is moved: one is replaced at once, several are recognisably incomplete.
        for size in ("1GB", "20KB"):
            moves = mock.Mock(side_effect=[None, OSError("killed")])
            crash = mock.patch(f"{place}.os.replace", moves)
            with crash, mock.patch(f"{place}.NewFiles.discard"), pytest.raises(OSError, match="killed"):
                save_hf(other, folder, max_shard_size=size)
            if size == "1GB":
                load_hf(model, folder)
                assert_same_values(model.state_dict(), first)
        assert_raises(ValueError, "a save that did not end; save to it again", load_hf, model, folder)
        save_hf(other, folder)
        load_hf(model, folder)
        assert_same_values(model.state_dict(), other.state_dict())


@needs_peft
@on_ranks(2)
def test_the_base_of_an_adapted_model_is_loaded(rank: int) -> None:
    import peft

    family = FAMILIES["Llama"]
    plain = trained(family)
    config = peft.LoraConfig(target_modules=["q_proj", "embed_tokens"], modules_to_save=["lm_head"])
    model = shard(peft.get_peft_model(family.build(), config), family.is_unit)
    before = model.state_dict()
    with shared_folder() as folder:
        if rank == 0:
            plain.save_pretrained(folder)
        dist.barrier()
        load_hf(model, folder)
        found = model.state_dict()
        torch.manual_seed(0)
        expected = peft.get_peft_model(plain, config).state_dict()
        for key, value in found.items():
            assert torch.equal(value, before[key] if "lora_" in key else expected[key]), key
        assert_raises(ValueError, r"save_pretrained\(folder\) saves these", save_hf, model, folder)


class PeakMemory:
    """Samples how far this process's own memory rises inside the context; mapped files do not count.

    Attributes:
        bytes: the peak above the memory at the beginning.
    """

    def __enter__(self) -> PeakMemory:
        # glibc: freed memory is returned immediately, so that it does not count (M_MMAP_THRESHOLD, bytes).
        ctypes.CDLL(None).mallopt(-3, 1 << 16)
        self._before, self.bytes, self._ends = self._now(), 0, threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._ends.wait(0.0005):
            self.bytes = max(self.bytes, self._now() - self._before)

    @staticmethod
    def _now() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="counts what glibc allocates, on Linux")
@on_ranks(2)
def test_no_rank_has_the_model_in_its_memory(rank: int) -> None:
    """With eight equal layers the first rank holds one, twice: gathered, and as it is received."""
    family = FAMILIES["Llama"]
    sizes = {"hidden_size": 256, "intermediate_size": 2560, "num_hidden_layers": 8, "head_dim": 64}
    with torch.device("meta"):
        model: Any = family.build(**sizes)
    whole = 4 * model.num_parameters()
    shard(model, policy_of(model), device="cpu", param_init_fn=init_weights_of(model))
    with shared_folder() as folder:
        with PeakMemory() as saving:
            save_hf(model, folder)
        dist.barrier()
        with PeakMemory() as loading:
            load_hf(model, folder)
    assert saving.bytes < 0.4 * whole and loading.bytes < 0.1 * whole
