"""GPUs of ranks: one each, or shared by ranks that appear to NCCL as ranks of several hosts."""

from __future__ import annotations

import os
from unittest import mock

import pytest
import torch

from flatfsdp.comm.launch import Device, Launch, take_gpu


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> mock.Mock:
    """Two GPUs, which nobody uses."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    taken = mock.Mock()
    monkeypatch.setattr(torch.cuda, "set_device", taken)
    monkeypatch.setattr(os, "environ", {})
    return taken


def hosts_and_gpus(ranks: int) -> list[tuple[str | None, int]]:
    found = []
    for local in range(ranks):
        with mock.patch.dict(os.environ):
            device = take_gpu(local)
            found.append((os.environ.get("NCCL_HOSTID"), device.index))
    return found


def test_ranks_with_a_gpu_each_stay_on_one_host(gpus: mock.Mock) -> None:
    assert hosts_and_gpus(2) == [(None, 0), (None, 1)]
    assert [call.args[0].index for call in gpus.call_args_list] == [0, 1]


def test_no_two_ranks_of_one_host_share_a_gpu(gpus: mock.Mock) -> None:
    assert len(set(hosts_and_gpus(6))) == 6
    os.environ["NCCL_HOSTID"] = "mine"
    found = hosts_and_gpus(6)
    assert len(set(found)) == 6 and all(str(host).startswith("mine") for host, _ in found)


def test_sharing_is_asked_for(gpus: mock.Mock) -> None:
    assert Launch(4, Device.shared_cuda).use_cuda() and Launch(2, Device.cuda).use_cuda()
    assert not Launch(4, Device.auto).use_cuda()
    with pytest.raises(ValueError, match=r"needs one GPU for each of 4 ranks, .* shared-cuda"):
        Launch(4, Device.cuda)


def test_nothing_is_shared_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ValueError, match=r"shared-cuda needs a GPU"):
        Launch(2, Device.shared_cuda)
    with pytest.raises(ValueError, match=r"not 0$"):
        Launch(2, Device.cuda)
