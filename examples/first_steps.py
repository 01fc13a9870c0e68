"""Train a small GPT on this Python's own source code, sharded over any number of ranks.

python examples/first_steps.py                          # one process
torchrun --nproc-per-node 2 examples/first_steps.py     # two ranks, on GPUs if there are enough
"""

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from flatfsdp import Precision, auto_wrap, by_class, microbatches
from flatfsdp.models.gpt import GPT, Block, GPTConfig
from flatfsdp.models.text import Sampler, load_corpus

ENVIRONMENT = {"RANK": 0, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}  # torchrun sets these
rank, local_rank, local_size = (int(os.environ.get(name, default)) for name, default in ENVIRONMENT.items())
device = torch.device("cuda", local_rank) if local_size <= torch.cuda.device_count() else torch.device("cpu")
if "RANK" in os.environ:
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timedelta(seconds=300))

config = GPTConfig(layers=2, hidden=64, heads=4, seq=64)
model = auto_wrap(
    GPT(config),
    by_class(Block),  # one unit per transformer layer, and one for the rest
    device=device,
    precision=Precision(compute=torch.bfloat16),  # FP32 shards, FP32 accumulation and reduction
)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
text = Sampler(load_corpus(None), batch=4, seq=config.seq, seed=0)

for step in range(20):
    batches = [text.sample(step, microbatch, rank) for microbatch in range(4)]
    for tokens, targets in microbatches(model, batches):  # gradients are reduced in the last one's backward
        loss = model(tokens.to(device), targets.to(device))
        loss.backward()
    norm = model.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0 and step % 5 == 4:
        print(f"step {step + 1:3d}  loss {loss.item():.3f}  gradient norm {norm.item():.2f}")

state = model.state_dict()  # full and unsharded, under the names of the plain GPT; every rank takes part
if rank == 0:
    print(f"{sum(value.numel() for value in state.values()):,} parameters, first: {next(iter(state))}")
if dist.is_initialized():
    dist.destroy_process_group()
