"""`verify --matrix`: rows of one model shared over ranks in many ways.

In:   the options of `verify`.
Out:  a `Plan` of the rows that fit the numbers of ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any, get_args

import torch

from flatfsdp.cli.verify import Plan, Row
from flatfsdp.comm.lanes import Lanes
from flatfsdp.comm.launch import Device, Launch, under_torchrun
from flatfsdp.comm.parallelism import Parallelism
from flatfsdp.models import LlamaConfig
from flatfsdp.models.pipeline import ScheduleName
from flatfsdp.parity import Switch
from flatfsdp.training.choices import Fusion, PrecisionName, Strategy
from flatfsdp.training.jobs import Configuration, Settings

ON_CPU = Settings(LlamaConfig(4, 64, 128, heads=4, kv_heads=2, vocab=256, seq=32), batch=2, steps=4)
ON_GPUS = Settings(
    LlamaConfig(4, 512, 1408, heads=8, kv_heads=4, vocab=256, seq=512), batch=2, steps=10, lr=1e-3
)
"""Default settings of rows: with these sizes a row takes seconds."""

FP32, BF16, FP8 = PrecisionName.fp32, PrecisionName.bf16, PrecisionName.fp8_delayed
PIPELINES: tuple[ScheduleName, ...] = get_args(ScheduleName)


def all_rows() -> list[Configuration]:
    """Lists the rows for 8 ranks, in bf16 and FP8 and with every schedule, and their halves for 4 and 2.

    Rows that free parameters have unfused weight gradients; rows that keep them have fused ones.
    """
    return [
        *_rows_for_2(),
        *_rows_for_4(),
        *_rows_for_8(),
        *_rows_that_reduce_often(),
        *_rows_with_lanes(),
    ]


def _rows_for_2() -> Iterable[Configuration]:
    pp, tp, sp = Parallelism(pp=2), Parallelism(tp=2), Parallelism(tp=2, sequence_parallel=True)
    for precision in (FP32, BF16, FP8):
        for schedule, fusion in zip(PIPELINES, (Fusion.off, Fusion.fused, Fusion.two_pass), strict=True):
            yield Configuration(pp, precision, fusion=fusion, schedule=schedule)
        yield Configuration(tp, precision, fusion=Fusion.off)
        yield Configuration(sp, precision)
    for precision in (PrecisionName.fp8_current, PrecisionName.fp8_weights):
        yield Configuration(pp, precision, Strategy.zero2, schedule="interleaved")
        yield Configuration(sp, precision)


def _rows_for_4() -> Iterable[Configuration]:
    pp_tp = Parallelism(pp=2, tp=2, sequence_parallel=True)
    pp_dp = Parallelism(pp=2, dp_shard=2)
    dp_tp = Parallelism(dp_shard=2, tp=2, sequence_parallel=True)
    for precision in (BF16, FP8):
        for schedule, fusion in zip(PIPELINES, (Fusion.off, Fusion.fused, Fusion.two_pass), strict=True):
            yield Configuration(pp_tp, precision, fusion=fusion, schedule=schedule)
        for schedule, strategy in zip(
            PIPELINES, (Strategy.zero3, Strategy.zero2, Strategy.zero3), strict=True
        ):
            yield Configuration(pp_dp, precision, strategy, schedule=schedule)
        for strategy, fusion in ((Strategy.zero3, Fusion.off), (Strategy.zero2, Fusion.fused)):
            yield Configuration(dp_tp, precision, strategy, fusion)
    yield Configuration(pp_tp, FP32)
    yield Configuration(pp_dp, FP32, Strategy.zero2, Fusion.off, "interleaved")
    yield Configuration(dp_tp, FP32)
    yield Configuration(pp_dp, PrecisionName.fp8_weights)


def _rows_for_8() -> Iterable[Configuration]:
    whole = Parallelism(pp=2, dp_shard=2, tp=2, sequence_parallel=True)
    flat = Parallelism(dp_shard=4, tp=2, sequence_parallel=True)
    for precision in (BF16, FP8):
        for strategy, fusion in ((Strategy.zero3, Fusion.off), (Strategy.zero2, Fusion.fused)):
            for schedule in PIPELINES:
                yield Configuration(whole, precision, strategy, fusion, schedule)
            yield Configuration(flat, precision, strategy, fusion)
    yield Configuration(replace(whole, sequence_parallel=False), FP8)
    yield Configuration(whole, PrecisionName.fp8_weights, schedule="interleaved")


def _rows_that_reduce_often() -> Iterable[Configuration]:
    """Rows that reduce gradients in every microbatch, each over two shards, as one needs no reduction."""
    every = partial(Configuration, sync="every")
    shards, pp_dp = Parallelism(dp_shard=2), Parallelism(pp=2, dp_shard=2)
    dp_tp = Parallelism(dp_shard=2, tp=2, sequence_parallel=True)
    yield every(shards, FP32)
    yield every(shards, BF16, Strategy.zero2, Fusion.off)
    yield every(shards, PrecisionName.fp8_weights)
    yield every(pp_dp, BF16, Strategy.zero2, Fusion.off, "gpipe")
    yield every(pp_dp, FP8, schedule="interleaved")
    yield every(dp_tp, FP8)
    yield every(replace(shards, dp_replicate=2), BF16)
    yield every(replace(dp_tp, pp=2), PrecisionName.fp8_weights)


def _rows_with_lanes() -> Iterable[Configuration]:
    """Rows that have the bits of one rank; all of them data parallel, as lanes are."""
    for ranks in (2, 4, 8):
        # Two lanes a rank, so that each adds up several, and there are the three that a self test needs.
        on = partial(Configuration, lanes=Lanes(2 * ranks))
        shards = Parallelism(dp_shard=ranks)
        yield on(shards, FP32, Strategy.zero2, Fusion.off)
        yield on(shards, BF16)
        yield on(shards, FP8, Strategy.zero2)
        yield on(shards, PrecisionName.fp8_weights)
        if ranks > 2:
            half = ranks // 2
            yield on(Parallelism(dp_replicate=2, dp_shard=half), FP8, lanes=Lanes(2 * ranks, block=half))


def matrix_plan(device: Device, ranks: int | None, given: dict[str, Any]) -> Plan:
    """Chooses rows, settings and launches.

    Args:
        device: device of the ranks.
        ranks: number of ranks; None for torchrun's, or 2 and 4 on a CPU, or as many as there are GPUs for.
        given: options of `verify` that are given on the command line, by name.

    Raises:
        ValueError: if the options are invalid, or leave no row.
    """
    launches = _launches(device, ranks)
    settings = _settings(ON_GPUS if launches[0].use_cuda() else ON_CPU, given)
    worlds = [launch.world for launch in launches]
    if set(given.get("switch", [Switch.flag])) != {Switch.flag}:
        raise ValueError("--matrix switches optimize_backward_concat: leave --switch out")
    rows: list[Row] = []
    left_out: dict[str, str] = {}
    for configuration in _wanted(all_rows(), given):
        assert configuration.parallelism is not None
        world = configuration.parallelism.world
        try:
            if world not in worlds:
                raise ValueError(f"they need {world} ranks")
            rows.append(Row(settings, configuration, Switch.flag, world))
        except ValueError as error:
            left_out[configuration.name] = str(error)
    if not rows:
        reasons = "; ".join(dict.fromkeys(left_out.values()))
        reasons = reasons or "none has such a name, precision, strategy and fusion"
        raise ValueError(f"no row of the matrix can run here, as {reasons}")
    return Plan(tuple(rows), launches, left_out, "self_test" in given)


def _launches(device: Device, ranks: int | None) -> tuple[Launch, ...]:
    if under_torchrun() or ranks is not None:
        return (Launch(ranks, device, deterministic=True),)
    gpus = 0 if device is Device.cpu else torch.cuda.device_count()
    sizes = next(((size,) for size in (8, 4, 2) if size <= gpus), (2, 4))
    return tuple(Launch(size, device, deterministic=True) for size in sizes)


def _settings(usual: Settings[LlamaConfig], given: dict[str, Any]) -> Settings[LlamaConfig]:
    def chosen(*names: str) -> dict[str, Any]:
        return {name: given[name] for name in names if name in given}

    of_model = chosen("layers", "hidden", "heads", "seq")
    if "hidden" in given:
        of_model["ffn"] = 2 * given["hidden"]
    if "heads" in given:
        of_model["kv_heads"] = max(1, given["heads"] // 2)
    of_run = chosen("batch", "microbatches", "steps", "lr", "seed", "data")
    return replace(usual, model=replace(usual.model, **of_model), **of_run)


def _wanted(rows: Iterable[Configuration], given: dict[str, Any]) -> list[Configuration]:
    """Rows with the given precisions, strategies, fusions, and words of --only."""
    return [
        row
        for row in rows
        if row.precision in given.get("precision", PrecisionName)
        and row.strategy in given.get("strategy", Strategy)
        and row.fusion in given.get("fusion", Fusion)
        and any(word in row.name for word in given.get("only", [""]))
    ]
