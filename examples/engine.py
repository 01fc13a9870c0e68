"""An engine in 300 lines: sharded training (FSDP) over flat buffers, in plain PyTorch.

    python examples/engine.py                         # starts two ranks on this machine
    torchrun --nproc-per-node 2 examples/engine.py    # any number of ranks, on GPUs if each can have one

This is FlatFSDP without what a production engine needs besides: the same idea, and the same bits, which
tests/dist/examples/test_engine.py compares.  It imports nothing but torch.  Read it from top to bottom.

WHAT FSDP DOES.  In data parallelism every rank computes gradients on data of its own, and their mean updates
the model.  Done plainly, each rank holds the whole model four times: parameters, gradients, and AdamW's two
moments.  FSDP (ZeRO-3) cuts all four into N shards, one a rank, and gathers parameters where they are needed:

    forward      all-gather the layer's parameters, compute, free them
    backward     all-gather them again, compute, free them;
                 reduce-scatter the gradients: each rank gets its own shard of the mean
    optimizer    update the shard, as if that were a small model

WHY ONE FLAT BUFFER A UNIT.  A unit is what is gathered and freed together, usually one transformer layer.  It
has a dozen parameters, some of them tiny, and a collective is fast only on one long piece of memory.  So they
lie one after the other in one flat buffer, padded to a multiple of N.  One all-gather fills it, and nothing
is copied out.  A second buffer of the same layout, `main_grad`, collects gradients; one reduce-scatter reads
it, and nothing is copied in.  The optimizer updates one 1-D shard a unit, which may begin and end in the
middle of a matrix: AdamW treats every element by itself.

WHY LEAVES THAT ALIAS IT.  `module.weight` must be a slice of the first buffer, and its gradient must get to
the same slice of the second.  There are two ways.  They differ only in which tensors are the leaves of
autograd's graph, those that it computes a `.grad` for:

    optimize_backward_concat=False    The flat buffer is the one leaf, and weights are views of it.  The
        backward of cutting it into views is a concatenation: in every microbatch, autograd keeps the
        gradients of the whole unit, and copies them into another flat tensor, to be added to `main_grad`.
    optimize_backward_concat=True    Every parameter is a leaf, and only its memory is a slice of the buffer.
        As autograd knows nothing of its neighbours, it concatenates nothing.  A hook takes each gradient as
        soon as it exists, adds it to its slice of `main_grad`, and frees it.

Both add the same numbers in the same order, so all bits are equal, as `main` shows.  The second way reads and
writes each gradient once less in every microbatch, and a layer's GEMM may even add to `main_grad` itself.

WHY THE REDUCTION WAITS.  The gradient of a step is a sum over microbatches and a mean over ranks.  We add up
microbatches first, so that gradients are sent once a step and not once a microbatch.  The price is a whole
FP32 gradient on every rank from the first microbatch to the last.

WHERE THE REAL ENGINE DOES MORE.  In `flatfsdp/engine`:

    storage/group.py             frozen parameters; FP8 weights; a cast once a step, not once a gather
    storage/backward_concat.py   the two ways as classes; freed parameters read as NaN, writes are noticed
    storage/main_grad.py         many small gradients in one launch; GEMMs that add to the buffer
    step/driven_unit.py          gathers ahead of use; any inputs and outputs; uses without a gradient
    step/reduce.py               replicas; other dtypes; bounded memory; parameters that no rank has used
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

# torch 2.13 renamed both, and warns about the old names.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


# ---- how parameters come and go --------------------------------------------------------------------------
class Unit:
    """Parameters of one module, which come and go together.  The module has to return one tensor."""

    def __init__(self, engine: Engine, module: nn.Module, parameters: list[nn.Parameter]) -> None:
        # All shards have one length.  The padding is one more slot, in which nothing ever lands.
        padding = -sum(each.numel() for each in parameters) % dist.get_world_size()
        self.shapes = [*(each.shape for each in parameters), torch.Size([padding])]
        whole = F.pad(torch.cat([each.detach().float().flatten() for each in parameters]), (0, padding))
        # The master shard, for the optimizer.  In FP32, because bf16 would lose small updates.  A clone,
        # because a slice would keep the whole buffer.
        self.shard = nn.Parameter(whole.chunk(dist.get_world_size())[dist.get_rank()].clone())
        # The flat buffer.  The tensor and its slices stay for good; only their memory comes and goes.
        self.flat = torch.empty_like(whole, dtype=engine.compute)
        self.views: list[tuple[nn.Module, str, int]] = []
        if engine.optimize_backward_concat:
            # The module keeps its Parameter objects.  They are leaves, and slices become their memory.
            self.leaves: Sequence[Tensor] = parameters
            self.main_grad = MainGrad(self.flat, self.slots)
            for parameter, slot in zip(parameters, self.slots(self.flat), strict=False):
                parameter.data = slot
        else:
            # One leaf, with one place.  `.data` gives it a version counter of its own: else autograd would
            # take a gather for a write to what it has saved, and refuse the backward.
            self.leaves = [self.flat.data.requires_grad_()]
            self.main_grad = MainGrad(self.flat, lambda total: [total])
            numbers = {parameter: number for number, parameter in enumerate(parameters)}
            for owner in module.modules():
                for name, parameter in list(owner.named_parameters(recurse=False)):
                    if parameter in numbers:
                        # A module lets no view take the place of a Parameter; each forward will set one.
                        delattr(owner, name)
                        self.views.append((owner, name, numbers[parameter]))
        self.missing, self.completed = len(self.leaves), engine.send_complete
        for number, leaf in enumerate(self.leaves):
            leaf.register_post_accumulate_grad_hook(partial(self.land, number))
        module.register_forward_pre_hook(self.before_forward)
        module.register_forward_hook(self.after_forward)
        self.reshard()

    def slots(self, flat: Tensor) -> list[Tensor]:
        """Cuts a flat buffer into a slice for each parameter, in its shape, and the padding."""
        parts = flat.split([shape.numel() for shape in self.shapes])
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def unshard(self, _grad: Tensor | None = None) -> None:
        """Gathers the parameters, unless they are here; also serves as a hook.  Collective."""
        storage = self.flat.untyped_storage()
        if storage.nbytes() == 0:
            # Resized and not replaced, so that all slices have memory again: the saved ones, too.
            storage.resize_(self.flat.nbytes)
            all_gather(self.flat, self.shard.detach().to(self.flat.dtype))

    def reshard(self) -> None:
        """Frees the memory of the parameters.  A read of them would crash now."""
        self.flat.untyped_storage().resize_(0)

    def before_forward(self, module: nn.Module, args: Any) -> None:
        self.unshard()
        if self.views:
            # The leaf requires a gradient, so autograd records this cut: its backward concatenates.
            slots = self.slots(self.leaves[0])
            for owner, name, number in self.views:
                setattr(owner, name, slots[number])

    def after_forward(self, module: nn.Module, args: Any, output: Tensor) -> None:
        if output.requires_grad:
            # Autograd has saved slices, and will read them once it has the gradient of the output.
            output.register_hook(self.unshard)
        self.reshard()

    def land(self, number: int, leaf: Tensor) -> None:
        """Takes the gradient of a leaf: autograd has added up all its uses in this backward."""
        grad, leaf.grad = leaf.grad, None
        self.main_grad.land(number, grad)
        self.missing -= 1
        if self.missing == 0:
            # Whichever node of the graph has made a weight's gradient has made its input's as well: nothing
            # in this backward reads the weights any more.
            self.reshard()
            self.completed()


# ---- where gradients land --------------------------------------------------------------------------------
class MainGrad:
    """Sums gradients over microbatches, at the places that `cut` makes of a flat buffer: one a leaf."""

    def __init__(self, flat: Tensor, cut: Callable[[Tensor], list[Tensor]]) -> None:
        self.flat, self.cut = flat, cut
        self.total: Tensor | None = None

    def open(self) -> Tensor:
        """Allocates the buffer at the first gradient of a step: until then, forwards have the memory."""
        if self.total is None:
            # FP32, also for layers that compute in bf16, where 256 + 1 is 256.
            self.total = torch.empty_like(self.flat, dtype=torch.float32)
            self.places = self.cut(self.total)
            self.written: set[int] = set()
        return self.total

    def land(self, number: int, grad: Tensor) -> None:
        """Adds the gradient of one microbatch at its place."""
        self.open()
        if number in self.written:
            self.places[number].add_(grad)
        else:
            # The first write copies, so nobody has to fill the buffer with zeros.
            self.places[number].copy_(grad)
            self.written.add(number)

    def take(self) -> Tensor:
        """Hands the buffer over.  The next step gets another one, as this one is still to be sent."""
        total, self.total = self.open(), None
        for number, place in enumerate(self.places):
            if number not in self.written:
                # Padding, or not used in this step: undefined memory, which would be sent.
                place.zero_()
        return total


# ---- when gradients are sent -----------------------------------------------------------------------------
class Engine:
    """Shards a model in place: each of `blocks` is a unit, and what is outside of them is another one.

    All ranks begin with the same values.  All parameters are trained, and none is in two blocks.
    """

    def __init__(
        self, model: nn.Module, *blocks: nn.Module, compute: torch.dtype, optimize_backward_concat: bool
    ) -> None:
        self.compute, self.optimize_backward_concat = compute, optimize_backward_concat
        inside = {parameter for block in blocks for parameter in block.parameters()}
        outside = [parameter for parameter in model.parameters() if parameter not in inside]
        self.units = [Unit(self, model, outside)]
        self.units += [Unit(self, block, list(block.parameters())) for block in blocks]
        self.shards: list[Tensor] = [unit.shard for unit in self.units]
        # A communicator runs collectives in the order of their launch, which must be the same on all ranks.
        # This one is for reductions alone, as ranks may launch one between different gathers.
        self.group = dist.new_group()

    def microbatches(self, batches: Tensor) -> Iterator[Tensor]:
        """Yields the rows, each for a forward and its backward; after the last one, shards have gradients."""
        self.waiting = list(self.units)
        self.sent: list[tuple[Unit, Tensor, Tensor, Any]] = []
        for number, batch in enumerate(batches, start=1):
            # Read when a gradient lands; forwards are the same in all microbatches.
            self.is_last = number == len(batches)
            yield batch
            for unit in self.units:
                # Where a parameter was not used, its gradient is still missing, and the unit still here.
                unit.missing = len(unit.leaves)
                unit.reshard()
        while self.waiting:
            # Such a unit is sent all the same: other ranks may have used all of it, and wait for this one.
            self.send(self.waiting.pop())
        while self.sent:
            unit, mean, _, work = self.sent.pop()
            work.wait()
            unit.shard.grad = mean

    def send_complete(self) -> None:
        """Sends units that have all gradients, in reverse order of registration, as a backward meets them.

        A fixed order: gradients may land in another one on another rank, and both must send the same unit.
        """
        while self.is_last and self.waiting and self.waiting[-1].missing == 0:
            self.send(self.waiting.pop())

    def send(self, unit: Unit) -> None:
        """Starts the reduction of a unit, which runs beside the rest of the backward.  Collective."""
        total, mean = unit.main_grad.take(), torch.empty_like(unit.shard)
        work = reduce_scatter(mean, total, op=dist.ReduceOp.AVG, group=self.group, async_op=True)
        # `total` as well: freed here, its memory would be reused while it is being sent.
        self.sent.append((unit, mean, total, work))


# ---- a training, with the option off and on --------------------------------------------------------------
class Block(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class Concatenations(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.cat.default
        return func(*args, **(kwargs or {}))


def train(device: torch.device, option: bool) -> tuple[list[Tensor], list[Tensor], int]:
    torch.manual_seed(0)
    blocks = [Block(nn.LayerNorm(32), nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(4)]
    model = nn.Sequential(nn.Embedding(61, 32), *blocks, nn.Linear(32, 61)).to(device)
    engine = Engine(model, *blocks, compute=torch.float32, optimize_backward_concat=option)
    optimizer = torch.optim.AdamW(engine.shards, lr=3e-3)
    generator, losses = torch.Generator().manual_seed(dist.get_rank()), []
    with Concatenations() as concatenations:
        for _ in range(20):
            data = torch.randint(61, (4, 64), generator=generator).to(device)
            for tokens in engine.microbatches(data):
                loss = F.cross_entropy(model(tokens), (3 * tokens + 1) % 61)
                (loss / len(data)).backward()
                losses.append(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
    return losses, engine.shards, concatenations.count


def main() -> None:
    device = torch.device("cpu")
    if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    off, on = (train(device, option) for option in (False, True))
    assert all(map(torch.equal, off[0] + off[1], on[0] + on[1])), "the option has changed a bit"
    if dist.get_rank() == 0:
        for option, (losses, _, count) in {"off": off, "on": on}.items():
            print(f"option {option}: loss {losses[0]:.3f} to {losses[-1]:.3f}, {count} concatenations")
        print("All losses and parameters are equal bit for bit.")
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" not in os.environ:
        run = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        os.execve(sys.executable, [sys.executable, *run, __file__], {"OMP_NUM_THREADS": "1", **os.environ})
    main()
