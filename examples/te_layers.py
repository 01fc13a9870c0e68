"""Transformer Engine's own layers inside FlatFSDP: FP8, fused weight gradients, sharded, saved and resumed.

    python examples/te_layers.py                           # one GPU
    torchrun --nproc-per-node 4 examples/te_layers.py      # parameters over four

Weight gradients land in FlatFSDP's flat FP32 buffers inside Transformer Engine's GEMMs, microbatch after
microbatch, and are reduced once.  A checkpoint holds the scales of FP8, too: the resumed run has the bits of
the one that went on.
"""

from __future__ import annotations

import os
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch import Tensor, nn

from flatfsdp import Precision, auto_wrap, by_class, checkpoint, microbatches
from flatfsdp.comm.launch import Device, Launch, Rank, is_main, run_on_ranks, under_torchrun


class Model(nn.Module):
    """A few layers that learn to undo a shift of their input."""

    def __init__(self, layers: int, hidden: int) -> None:
        super().__init__()
        # Read when it is imported: attention whose backward repeats its bits.
        os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
        import transformer_engine.pytorch as te
        from transformer_engine.common.recipe import DelayedScaling

        self.layers = nn.ModuleList(
            te.TransformerLayer(
                hidden,
                4 * hidden,
                hidden // 64,
                layer_number=index + 1,
                hidden_dropout=0.0,
                attention_dropout=0.0,
                self_attn_mask_type="causal",
                params_dtype=torch.float32,  # the master weights; FlatFSDP computes in bf16
                fuse_qkv_params=True,
                fuse_wgrad_accumulation=True,
            )
            for index in range(layers)
        )
        self.region = lambda: te.autocast(enabled=True, recipe=DelayedScaling(amax_history_len=16))

    def forward(self, x_sbc: Tensor, target_sbc: Tensor, first: bool) -> Tensor:
        """The mean squared error, FP32.

        Args:
            first: FP8 weights are cast in the first microbatch of a step, and kept for the others.
        """
        with self.region():
            for layer in self.layers:
                x_sbc = layer(x_sbc, is_first_microbatch=first)
        return (x_sbc.float() - target_sbc.float()).square().mean()


class Run:
    """A model in training."""

    def __init__(self, rank: Rank, layers: int, hidden: int) -> None:
        torch.manual_seed(0)
        self.rank, self.hidden = rank, hidden
        model = Model(layers, hidden)
        self.model = auto_wrap(
            model,
            by_class(type(model.layers[0])),
            precision=Precision(compute=torch.bfloat16),
            optimize_backward_concat=True,
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def step(self, index: int) -> float:
        """One step of four microbatches; returns the last one's loss."""
        generator = torch.Generator(self.rank.device).manual_seed(1000 * index + self.rank.index)
        shape = (4, 256, 2, self.hidden)
        inputs = torch.randn(shape, generator=generator, device=self.rank.device, dtype=torch.bfloat16)
        loss = torch.zeros(())
        for number, x_sbc in enumerate(microbatches(self.model, list(inputs))):
            loss = self.model(x_sbc, x_sbc.roll(1, 0), number == 0)
            (loss / len(inputs)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


def train(rank: Rank, settings: tuple[int, int, int]) -> dict[str, Any]:
    """Trains, saves on the way, goes on; loads, goes on again, and compares."""
    layers, hidden, steps = settings
    folder: list[Any] = [tempfile.mkdtemp() if rank.index == 0 else None]
    dist.broadcast_object_list(folder)
    path = Path(folder[0]) / "half-way"
    run = Run(rank, layers, hidden)
    losses = [run.step(index) for index in range(steps // 2)]
    checkpoint.save(path, run.model, run.optimizer)
    rest = [run.step(index) for index in range(steps // 2, steps)]
    resumed = Run(rank, layers, hidden)
    checkpoint.load(path, resumed.model, resumed.optimizer)
    again = [resumed.step(index) for index in range(steps // 2, steps)]
    return {"losses": [*losses, *rest], "resumed": again, "same_bits": again == rest}


app = typer.Typer(add_completion=False, rich_markup_mode="markdown")


@app.command(
    help="Train Transformer Engine's layers under FlatFSDP, save half-way, resume, and compare the losses.",
    epilog="""Examples:

    python examples/te_layers.py

    torchrun --nproc-per-node 4 examples/te_layers.py --layers 8 --hidden 4096""",
)
def main(
    layers: Annotated[int, typer.Option(min=1, help="Transformer layers; each is one unit.")] = 4,
    hidden: Annotated[int, typer.Option(min=64, help="Width, a multiple of 64.")] = 1024,
    steps: Annotated[int, typer.Option(min=2, help="Optimizer steps.")] = 10,
    ranks: Annotated[int, typer.Option(min=1, help="GPUs; torchrun's own under torchrun.")] = 1,
) -> None:
    if find_spec("transformer_engine") is None or not torch.cuda.is_available():
        raise typer.BadParameter(
            "this needs a GPU and Transformer Engine: pip install --no-build-isolation "
            "'transformer_engine[pytorch]'"
        )
    launch = Launch(None if under_torchrun() else ranks, Device.cuda)
    found = run_on_ranks(train, (layers, hidden, steps), launch)
    if is_main():
        for index, loss in enumerate(found["losses"]):
            typer.echo(f"step {index}: loss {loss:.4f}")
        typer.echo(
            f"resumed from step {steps // 2}: {'the same bits' if found['same_bits'] else 'OTHER BITS'}"
        )
    raise typer.Exit(0 if not is_main() or found["same_bits"] else 1)


if __name__ == "__main__":
    app()
