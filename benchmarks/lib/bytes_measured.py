"""The bytes that one optimizer step copies and sends, counted from outside, beside what its design promises.

In:   a `Case` and its number of microbatches, on each of several gloo ranks.
Out:  a `CountedBytes`, the same on all ranks.
Next: `bytes.py` shows the rows.
"""

from __future__ import annotations

import importlib
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from flatfsdp import Precision, by_class, fp8, microbatches, shard
from flatfsdp.fp8 import CurrentScaling
from flatfsdp.layers import convert
from lib.bytes_formulas import HIDDEN, UNITS, WIDTH, Case, Traffic, promised
from lib.copy_counter import CopyCounter, Kind

TOKENS = 16
MIN_NUMEL = WIDTH * HIDDEN // 4
"""A quarter of a weight, which is more than two activations of 16 * 512 elements."""

LEDGER = {
    "cast": "cast",
    "measure": "amax",
    "transpose": "transpose",
    "concat": "concat",
    "accumulate": "accumulate",
    "gather": "wire_gather",
    "reduce": "wire_reduce",
}
"""The names of a `Traffic`'s parts in FlatFSDP's own account."""


@dataclass(frozen=True)
class CountedBytes:
    """A case at one number of ranks and microbatches: the measurement and the promise.

    Attributes:
        measured: None for a case that does not run here.
        ledger: FlatFSDP's own account in bytes per parameter; empty for other engines.
        missed: large operators that the counter does not know; the measurement is complete if empty.
    """

    case: Case
    ranks: int
    microbatches: int
    measured: Traffic | None
    promised: Traffic
    ledger: dict[str, float]
    missed: dict[str, int]

    @property
    def label(self) -> str:
        """The row's name in tables and pictures."""
        case = self.case
        flag = "on" if case.concat_free else "off"
        names = {"FlatFSDP": f"FlatFSDP {flag}", "FSDP2": "FSDP2", "fairscale": "fairscale 0.4.13"}
        name = names[case.engine]
        if case.fp8:
            name += ", FP8 weights" if case.engine == "FlatFSDP" else " + torchao float8"
        sync = f", {case.sync}" if self.microbatches > 1 else ""
        formula = "" if self.measured is not None else " (formula)"
        return f"{name}, ZeRO-{case.zero}{sync}{formula}"

    @property
    def shown(self) -> Traffic:
        """The measurement, or the promise if there is none."""
        return self.promised if self.measured is None else self.measured

    def disagreements(self) -> list[str]:
        """The differences, one line each; should be empty."""
        if self.measured is None:
            return []
        found = [
            f"{f.name}: measured {got:g}, promised {want:g}"
            for f in fields(Traffic)
            if not equal(got := getattr(self.measured, f.name), want := getattr(self.promised, f.name))
        ]
        found += [f"operator not accounted for: {op} (x{times})" for op, times in self.missed.items()]
        for key, want in self._as_ledger(self.measured).items():
            if self.ledger and not equal(got := self.ledger.get(key, 0.0), want):
                found.append(f"ledger {key}: {got:g}, measured {want:g}")
        return found

    def _as_ledger(self, measured: Traffic) -> dict[str, float]:
        """The measurement under the ledger's names; the ledger also counts the norms."""
        norms = promised(replace(self.case, fp8=False), self.ranks, self.microbatches)
        share = 1 - self.case.weights_share
        return {key: getattr(measured, name) + share * getattr(norms, name) for key, name in LEDGER.items()}


def equal(a: float, b: float) -> bool:
    """Whether two numbers are equal up to rounding."""
    return abs(a - b) < 1e-6 * max(1.0, abs(a), abs(b))


class Block(nn.Module):
    """One unit to shard: x + down(relu(up(x))), 2 * width * hidden parameters and no biases."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Applies both layers, with a residual."""
        return x + self.down(self.up(x).relu())


class NormedBlock(Block):
    """A `Block` with a parameter that is not stored in FP8, and is too small to be counted alone."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__(width, hidden)
        self.norm = nn.RMSNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        """Applies the norm and the block."""
        return super().forward(self.norm(x))


def measure_all(rank: int, ranks: int, cases: list[tuple[Case, int]]) -> list[CountedBytes]:
    """Measures on one rank each case with its number of microbatches."""
    return [_measure(case, ranks, steps) for case, steps in cases]


def _measure(case: Case, ranks: int, steps: int) -> CountedBytes:
    expected = promised(case, ranks, steps)
    if not case.runs_here:
        return CountedBytes(case, ranks, steps, None, expected, {}, {})
    torch.manual_seed(0)
    block = NormedBlock if case.fp8 else Block
    shard = _flat if case.engine == "FlatFSDP" else _fsdp2
    model = shard(nn.Sequential(*(block(WIDTH, HIDDEN) for _ in range(UNITS))), case)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    _step(model, optimizer, case, steps)
    ledger = getattr(model, "ledger", None)
    if ledger is not None:
        ledger.reset()
    with CopyCounter(MIN_NUMEL) as counter:
        _step(model, optimizer, case, steps)
    return CountedBytes(
        case=case,
        ranks=ranks,
        microbatches=steps,
        measured=_traffic(counter, case.parameters),
        promised=expected,
        ledger=dict(ledger.bytes_per_parameter()) if ledger is not None else {},
        missed=dict(counter.unclassified),
    )


def _flat(model: nn.Sequential, case: Case) -> nn.Module:
    if case.fp8:
        convert(model, filter=lambda linear, name: True, fuse_wgrad_accumulation=True)
    return shard(
        model,
        by_class(Block),
        precision=Precision(compute=torch.bfloat16, fp8_weights=CurrentScaling() if case.fp8 else None),
        reshard_after_forward=case.zero == 3,
        optimize_backward_concat=case.concat_free,
        grad_sync=case.sync,
    )


def _fsdp2(model: nn.Sequential, case: Case) -> nn.Module:
    if case.fp8:
        float8 = importlib.import_module("torchao.float8")
        config = float8.Float8LinearConfig(enable_fsdp_float8_all_gather=True)
        float8.convert_to_float8_training(model, config=config)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for unit in [*model, model]:
        fully_shard(unit, mesh=mesh, mp_policy=precision, reshard_after_forward=case.zero == 3)
    return model


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, case: Case, steps: int) -> None:
    batches = [torch.randn(TOKENS, WIDTH) for _ in range(steps)]
    for index, batch in enumerate(microbatches(model, batches)):
        if isinstance(model, FSDPModule):
            is_last = index == steps - 1
            model.set_requires_gradient_sync(is_last or case.sync == "every")
            # ZeRO-2 keeps parameters for a step; by default FSDP2 gathers them in every microbatch.
            model.set_reshard_after_backward(is_last or case.zero == 3)
        with _region(case):
            loss = model(batch).float().sum()
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if case.engine == "FSDP2" and case.fp8:
        importlib.import_module("torchao.float8").precompute_float8_dynamic_scale_for_fsdp(model)


def _region(case: Case) -> AbstractContextManager[None]:
    in_fp8 = case.engine == "FlatFSDP" and case.fp8
    return fp8.autocast(recipe=CurrentScaling()) if in_fp8 else nullcontext()


def _traffic(counter: CopyCounter, parameters: int) -> Traffic:
    def per_parameter(nbytes: float) -> float:
        return nbytes / parameters

    return Traffic(
        cast=per_parameter(counter.bytes(Kind.CAST)),
        amax=per_parameter(counter.bytes(Kind.MEASURE)),
        transpose=per_parameter(counter.bytes(Kind.TURN)),
        copy=per_parameter(counter.bytes(Kind.COPY)),
        concat=per_parameter(counter.bytes(Kind.CONCAT)),
        accumulate=per_parameter(counter.bytes(Kind.WIDEN, Kind.ADD)),
        other=per_parameter(counter.bytes(Kind.SCALE, Kind.FILL)),
        gathers=counter.calls("all_gather") / UNITS,
        reduces=counter.calls("reduce_scatter") / UNITS,
        wire_gather=per_parameter(counter.wire("all_gather")),
        wire_reduce=per_parameter(counter.wire("reduce_scatter")),
    )
