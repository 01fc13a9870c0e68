"""Lightning Fabric with FlatFSDP: FP8 GEMMs, sharded FP8 weights and torch.compile in one training loop.

python examples/fabric.py                                         # on all GPUs, or one CPU process
python examples/fabric.py --accelerator cpu --devices 2           # two processes on the CPU
python examples/fabric.py --devices 4 --hidden 4096 --heads 32 --lr 3e-4 --compile

Needs `pip install lightning-fabric` (or `lightning`).  Restarted with more --steps, it continues.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer

from flatfsdp import Precision, auto_wrap, by_class, microbatches
from flatfsdp.compat.lightning import Fabric, FlatFSDPStrategy
from flatfsdp.fp8 import CurrentScaling, DelayedScaling, autocast
from flatfsdp.layers import convert
from flatfsdp.models.gpt import GPT, Block, GPTConfig
from flatfsdp.models.text import Sampler, load_corpus
from flatfsdp.training import command_options


def main(
    accelerator: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "auto",
    devices: Annotated[str, typer.Option(help="How many; Fabric starts a process for each.")] = "auto",
    fp8: Annotated[bool, typer.Option(help="FP8 GEMMs and weights; else bf16.")] = True,
    compiled: Annotated[bool, typer.Option("--compile", help="Compile what is between products.")] = False,
    steps: command_options.Steps = 20,
    layers: command_options.Layers = 2,
    hidden: command_options.Hidden = 64,
    heads: command_options.Heads = 4,
    lr: command_options.LearningRate = 3e-3,
    accumulation: Annotated[int, typer.Option("--microbatches", min=1, help="In one step.")] = 4,
    out: Annotated[Path, typer.Option(help="Folder of the checkpoint.")] = Path("out/fabric"),
) -> None:
    """Train a small GPT on this Python's own source code with Lightning Fabric, in FP8, sharded.

    For example:

    python examples/fabric.py --accelerator cpu --devices 2

    python examples/fabric.py --devices 4 --hidden 4096 --heads 32 --lr 3e-4 --compile
    """
    fabric = Fabric(accelerator=accelerator, devices=devices, strategy=FlatFSDPStrategy())
    fabric.launch()
    config = GPTConfig(layers, hidden, heads, seq=64)

    # The nn.Linear of each transformer layer become FP8 layers, which add their weight gradients to the flat
    # FP32 buffer inside the GEMM.
    model = GPT(config)
    convert(model.blocks, filter=lambda linear, name: True, fuse_wgrad_accumulation=True)
    if compiled:
        for block in model.blocks:
            # The forward and not the module: the engine's hooks run around it.
            block.forward = torch.compile(block.forward)
    # Each layer is a unit.  Its FP8 weights are cast once a step and gathered as one byte per element.
    stored = CurrentScaling() if fp8 else None
    model = auto_wrap(
        model,
        by_class(Block),
        device=fabric.device,
        precision=Precision(compute=torch.bfloat16, fp8_weights=stored),
        optimize_backward_concat=True,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    model, optimizer = fabric.setup(model, optimizer)

    recipe = DelayedScaling(amax_history_len=16)  # of activations and gradients
    state = {"model": model, "optimizer": optimizer, "step": 0}
    if (out / ".metadata").exists():
        fabric.load(out, state)
    text = Sampler(load_corpus(None), batch=4, seq=config.seq, seed=0)
    for step in range(state["step"], steps):
        samples = [text.sample(step, number, fabric.global_rank) for number in range(accumulation)]
        # Gradients are added up in FP32, and reduced in the last backward.
        for tokens, targets in microbatches(model, fabric.to_device(samples)):
            with autocast(fp8, recipe=recipe):
                loss = model(tokens, targets)
            fabric.backward(loss / accumulation)
        norm = fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        state["step"] = step + 1
        fabric.print(f"step {step + 1:3d}  loss {loss:.4f}  gradient norm {norm:.3f}", flush=True)
    fabric.save(out, state)  # each rank its part; any number of ranks can go on from it


if __name__ == "__main__":
    typer.run(main)
