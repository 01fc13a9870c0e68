"""`tests.foreign` tells apart what passed, what is refused, and what asks for another interface.

The suites below are in the style of FSDP2's and of Megatron-FSDP's tests, and ours.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests.foreign.__main__ import main

FSDP2 = """
import copy
import unittest

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.common_cuda import TEST_CUDA
from torch.testing._internal.common_distributed import skip_if_lt_x_gpu
from torch.testing._internal.common_fsdp import FSDPTest, FSDPTestMultiThread, check_sharded_parity


def models(**options):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2)).cuda()
    sharded = copy.deepcopy(plain)
    fully_shard(sharded[0], **options)
    fully_shard(sharded, **options)
    return plain, sharded


class TestTraining(FSDPTest):
    @property
    def world_size(self):
        return min(2, torch.cuda.device_count())

    @skip_if_lt_x_gpu(2)
    def test_parity(self):
        self.run_subtests({"reshard_after_forward": [True, 2], "dim": [5]}, self._test_parity)

    def _test_parity(self, reshard_after_forward, dim):
        plain, sharded = models(reshard_after_forward=reshard_after_forward)
        inputs = torch.full((4, dim), self.rank + 1.0, device="cuda")
        for model in (plain, sharded):
            model(inputs).sum().backward()
        for parameter in plain.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad.div_(self.world_size)
        check_sharded_parity(self, plain, sharded)
        for tensor in (plain[0].weight.grad, plain[0].weight.data):
            tensor.add_(1e-3)
            with self.assertRaises(AssertionError):
                check_sharded_parity(self, plain, sharded)
            tensor.sub_(1e-3)
        plain[0].weight.grad = None
        with self.assertRaises(AssertionError):
            check_sharded_parity(self, plain, sharded)

    def test_left_out(self):
        plain, sharded = models()
        backward_count = int(isinstance(sharded[0].weight, DTensor))
        self.assertTrue(backward_count >= 1)

    def test_own_part(self):
        plain, sharded = models()
        numel = torch.tensor(sum(p.to_local().numel() for p in sharded.parameters()))
        dist.all_reduce(numel)
        self.assertEqual(numel, sum(p.numel() for p in plain.parameters()))

    def test_placements(self):
        models(shard_placement_fn=lambda parameter: Shard(0))

    def test_words(self):
        with self.assertRaisesRegex(Exception, "once"):
            fully_shard(models()[1])

    def test_class(self):
        self.assertIsInstance(next(models()[1].parameters()), DTensor)

    def test_mesh(self):
        next(models()[1].parameters()).device_mesh

    def test_sleep(self):
        torch.cuda.synchronize()

    @skip_if_lt_x_gpu(8)
    def test_many(self):
        raise AssertionError

    def test_one_rank_fails(self):
        plain, sharded = models()
        if self.rank == 1 and not isinstance(sharded[0].weight, DTensor):
            raise ValueError("only here")
        sharded(torch.ones(4, 5))


class TestAlone(FSDPTestMultiThread):
    @property
    def world_size(self):
        return 1

    @unittest.skipIf(not TEST_CUDA, "no cuda")
    def test_forward(self):
        plain, sharded = models()
        self.assertEqual(dist.get_world_size(), 1)
        self.assertEqual(plain(torch.ones(1, 5)), sharded(torch.ones(1, 5)))
"""

MEGATRON = """
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from megatron.core.distributed.fsdp.src.megatron_fsdp.experimental import (
    Placements,
    fully_shard,
    fully_shard_context,
    fully_shard_optimizer,
    microbatch,
)


@pytest.mark.parametrize("parameter", [Shard(0), Replicate()], ids=["zero3", "zero2"])
@pytest.mark.parametrize("rate", [0.1, 0.2])
def test_losses(distributed_setup, rate, parameter):
    mesh = init_device_mesh(distributed_setup.device.type, (distributed_setup.world_size,))
    placements = Placements(dp_axes=[0], parameter=[parameter], gradient=[Shard(0)], optimizer=[Shard(0)])
    losses = []
    for sharded in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        if sharded:
            with fully_shard_context(device=distributed_setup.device) as context:
                fully_shard(model, mesh=mesh, placements=placements)
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        fully_shard_optimizer(optimizer)
        for step in range(2):
            for index in range(2):
                if sharded:
                    with microbatch(context, is_last=index == 1):
                        loss = model(torch.ones(2, 3)).square().mean()
                        loss.backward()
                else:
                    loss = model(torch.ones(2, 3)).square().mean()
                    loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
    torch.testing.assert_close(*losses)


def test_groups(distributed_setup):
    nn.Linear(3, 1).parameter_groups
"""

Pair = tuple[str, str]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("suites")
    (folder / "test_fully_shard_state.py").write_text(FSDP2)
    (folder / "test_fully_shard.py").write_text(MEGATRON)
    with patch("tests.foreign.__main__.PATIENCE", 3.0):
        code = main([str(folder), "--ranks", "2", "--json", str(folder / "outcomes.json")])
    return code, json.loads((folder / "outcomes.json").read_text())


def pairs(found: dict[str, Any], test: str) -> list[Pair]:
    return [
        (row["fully_shard"]["status"], row["shard"]["status"])
        for row in found["subtests"]
        if row["test"].rpartition(".")[2] == test
    ]


@pytest.mark.parametrize(
    ("test", "expected"),
    [
        ("test_parity", [("passed", "passed")] * 2),
        ("test_left_out", [("passed", "passed")]),
        ("test_own_part", [("passed", "passed")]),
        ("test_placements", [("passed", "refused")]),
        ("test_words", [("passed", "refused")]),
        ("test_class", [("passed", "other interface")]),
        ("test_mesh", [("passed", "other interface")]),
        ("test_sleep", [("skipped", "skipped")]),
        ("test_many", [("skipped", "skipped")]),
        ("test_one_rank_fails", [("passed", "failed")]),
        ("test_forward", [("passed", "passed")]),
        ("test_losses", [("skipped", "passed")] * 4),
        ("test_groups", [("skipped", "other interface")]),
    ],
)
def test_outcomes(ran: tuple[int, dict[str, Any]], test: str, expected: list[Pair]) -> None:
    assert pairs(ran[1], test) == expected


def test_each_subtest_has_its_arguments(ran: tuple[int, dict[str, Any]]) -> None:
    names = [row["subtest"] for row in ran[1]["subtests"] if row["test"].endswith("test_parity")]
    assert names == ["reshard_after_forward=True, dim=5", "reshard_after_forward=2, dim=5"]


def test_what_is_left_out_is_told(ran: tuple[int, dict[str, Any]]) -> None:
    (only,) = ran[1]["left_out"]["test_fully_shard_state.py"]
    line = FSDP2.splitlines().index("        self.assertTrue(backward_count >= 1)") + 1
    assert (only["line"], only["assertion"]) == (line, "self.assertTrue(backward_count >= 1)")
    assert "FSDP2's own autograd function" in only["reason"]


def test_a_failure_is_told_by_its_place(ran: tuple[int, dict[str, Any]]) -> None:
    (row,) = [each for each in ran[1]["subtests"] if each["test"].endswith("test_one_rank_fails")]
    assert "ValueError: only here" in row["shard"]["why"]


def test_the_command_fails_if_a_test_of_theirs_fails_only_here(ran: tuple[int, dict[str, Any]]) -> None:
    assert ran[0] == 1


def test_a_folder_without_tests(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="pass a clone of PyTorch"):
        main([str(tmp_path)])
