"""What `examples/cluster/` gives to clusters is read by the programs that it starts; no cluster is needed."""

from __future__ import annotations

import importlib.util
import os
import runpy
import stat
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import pytest
import yaml
from torch.distributed.run import get_args_parser
from typer.main import get_command

from tests.support.programs import ROOT

CLUSTER = ROOT / "examples" / "cluster"
OF_SKYPILOT = {
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NUM_GPUS_PER_NODE": "8",
    "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
    "SKYPILOT_TASK_ID": "sky-7",
}
OF_SLURM = {"SLURM_NNODES": "2", "SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "pretrain-llama"}


class Started(NamedTuple):
    """Words that torchrun is started with, and whether ranks that start again have a new store."""

    words: list[str]
    own_store: str


def start(script: str, folder: Path, environment: Mapping[str, str]) -> Started:
    """Runs a script of bash with an srun that runs its command here, and a torchrun that prints its words."""
    stand_ins = {
        "srun": 'while [[ "$1" == --* ]]; do shift; done; exec "$@"',
        "torchrun": 'echo "$TORCH_DISABLE_SHARE_RDZV_TCP_STORE"; printf "%s\\n" "$@"',
        "hostname": "echo host-0",
    }
    for name, line in stand_ins.items():
        (folder / name).write_text(f"#!/bin/bash\n{line}\n")
        (folder / name).chmod(stat.S_IRWXU)
    path = f"{folder}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", script], env={**environment, "PATH": path}, capture_output=True, text=True, check=True
    )
    own_store, *words = done.stdout.splitlines()
    return Started(words, own_store)


def options_of(words: list[str]) -> dict[str, Any]:
    """What `examples/pretrain_llama.py` reads from its command line."""
    with mock.patch.object(sys, "path", [str(ROOT / "examples"), *sys.path]):
        spec = importlib.util.spec_from_file_location("pretrain_llama", ROOT / "examples/pretrain_llama.py")
        assert spec is not None and spec.loader is not None
        example = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(example)
        return get_command(example.app).make_context("pretrain_llama.py", words).params


def require_hybrid(started: Started) -> Any:
    """Two hosts, each of which is a replica; returns what torchrun reads."""
    assert started.own_store == "1"
    read = get_args_parser().parse_args(started.words)
    assert read.training_script == "examples/pretrain_llama.py"
    found = options_of(read.training_script_args)
    names = ("dp_shard", "dp_replicate", "lanes", "lane_block", "microbatches")
    assert [found[name] for name in names] == [8, -1, 16, 8, 16]
    return read


def test_slurm(tmp_path: Path) -> None:
    read = require_hybrid(start((CLUSTER / "slurm.sh").read_text(), tmp_path, OF_SLURM))
    assert (read.nnodes, read.nproc_per_node, read.rdzv_id) == ("1:2", "8", "7")
    assert (read.rdzv_backend, read.rdzv_endpoint) == ("c10d", "host-0:29400")


def test_skypilot(tmp_path: Path) -> None:
    task = yaml.safe_load((CLUSTER / "skypilot.yaml").read_text())
    assert (task["num_nodes"], task["resources"]["accelerators"]) == (2, "H100:8")
    subprocess.run(["bash", "-n", "-c", task["setup"]], check=True)
    read = require_hybrid(start(task["run"], tmp_path, OF_SKYPILOT))
    assert (read.nnodes, read.nproc_per_node, read.rdzv_endpoint) == ("2", "8", "10.0.0.1:29400")


def test_kubernetes() -> None:
    job = yaml.safe_load((CLUSTER / "pytorchjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    worker = job["spec"]["pytorchReplicaSpecs"]["Worker"]
    assert worker["replicas"] == job["spec"]["elasticPolicy"]["maxReplicas"] == 2
    pod = worker["template"]["spec"]
    (container,) = pod["containers"]
    assert container["command"] == ["torchrun"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == int(job["spec"]["nprocPerNode"])
    assert {each["name"] for each in container["volumeMounts"]} == {each["name"] for each in pod["volumes"]}
    environment = {each["name"]: each["value"] for each in container["env"]}
    require_hybrid(Started(container["args"], environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"]))


def test_ray_train(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray, where it is not installed, is a stand-in that runs one rank here."""
    commands: list[tuple[list[str], str]] = []

    def run(command: list[str], *, env: Mapping[str, str], check: bool) -> None:
        assert check
        commands.append((command, env["MASTER_PORT"]))

    class TorchTrainer:
        def __init__(self, run_rank: Any, *, train_loop_config: Any, torch_config: Any, scaling_config: Any):
            assert scaling_config == {"num_workers": 16, "use_gpu": True}
            assert torch_config == {"backend": "gloo"}
            self.fit = lambda: run_rank(train_loop_config)

    for name, content in (
        ("ray", {}),
        ("ray.train", {"ScalingConfig": dict}),
        ("ray.train.torch", {"TorchConfig": dict, "TorchTrainer": TorchTrainer}),
    ):
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setenv("MASTER_PORT", "1234")
    monkeypatch.setattr(sys, "argv", ["ray_train.py", "16", "--preset", "1b", "--out", "/shared/out"])
    runpy.run_path(str(CLUSTER / "ray_train.py"), run_name="__main__")
    ((command, port),) = commands
    assert port != "1234"
    assert command[:2] == [sys.executable, "examples/pretrain_llama.py"]
    assert options_of(command[2:])["out"] == Path("/shared/out")
