"""Ray Train places the ranks and tells each who it is; a rank is our ordinary program.

ray job submit --working-dir . -- python examples/cluster/ray_train.py 16 --preset 1b --out /shared/out
"""

import os
import subprocess
import sys

from ray.train import ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer


def run_rank(config: dict[str, list[str]]) -> None:
    # Ray's own process group has the port that Ray names, and stays idle.
    environment = {**os.environ, "MASTER_PORT": "29511"}
    subprocess.run(
        [sys.executable, "examples/pretrain_llama.py", *config["options"]], env=environment, check=True
    )


ranks, *options = sys.argv[1:]
TorchTrainer(
    run_rank,
    train_loop_config={"options": options},
    torch_config=TorchConfig(backend="gloo"),
    scaling_config=ScalingConfig(num_workers=int(ranks), use_gpu=True),
).fit()
