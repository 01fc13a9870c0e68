"""torch.compile of each block: one graph for all of them, in which parameters may come and go."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from flatfsdp import Debug
from tests.support.models import Trace, build, same_trace, train
from tests.support.ranks import on_ranks


@on_ranks(2)
def test_compiled_blocks_give_the_bits_of_eager_ones(rank: int) -> None:
    def trained(backend: Any, **options: Any) -> Trace:
        model: Any = build(debug=Debug(poison_on_free=True), **options)
        for block in model.blocks:
            if backend is not None:
                block.compile(backend=backend)
        return train(model, rank)

    eager = trained(None)
    for options in (
        {"optimize_backward_concat": False},
        {"optimize_backward_concat": True, "reshard_after_forward": False},
    ):
        # It traces forward and backward, as any backend, and makes no code.
        graphs = CompileCounterWithBackend("aot_eager")
        assert all(same_trace(trained(graphs, **options), eager).values()), options
        # Neither another block nor another gather is a reason to compile again.
        assert graphs.frame_count == 1, options
        torch._dynamo.reset()


@on_ranks(1)
def test_the_step_of_another_model_is_compiled(rank: int) -> None:
    build()
    net = nn.Linear(2, 2)
    before = net.weight.detach().clone()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net(torch.ones(1, 2)).sum().backward()
    torch.compile(optimizer.step, backend="eager")()
    assert not torch.equal(net.weight, before)
    torch._dynamo.reset()
