"""Each rank's parts of a model: the flat layouts of its units, packed by the engine's own code.

In:   a `Job`.
Out:  the `Part`s of each pipeline rank, and the layouts of their units.
Next: `memory.py` and `traffic.py` shard the layouts.

Only one layer is built, on the meta device: all layers are alike.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

from torch import nn

from flatfsdp.comm.ranks import Ranks
from flatfsdp.engine.build.build_unit import bindings_of
from flatfsdp.flat.layout import FlatLayout
from flatfsdp.models import Llama, LlamaConfig
from flatfsdp.plan.job import Job

UnitLayouts = tuple[FlatLayout, ...]
"""The layouts of one unit's flat groups."""


class Part(NamedTuple):
    """One pipeline stage."""

    layers: int
    has_embedding: bool
    has_head: bool


def parts_of(job: Job) -> list[list[Part]]:
    """The stages of each pipeline rank."""
    stages, pp = job.stages, job.ranks.pp
    parts = [
        Part(len(layers), number == 0, number == len(stages) - 1) for number, layers in enumerate(stages)
    ]
    return [parts[rank::pp] for rank in range(pp)]


@dataclass(frozen=True)
class Layouts:
    """Layouts of a tensor-parallel rank's parts of a model.

    Attributes:
        layer: of each transformer layer, which is a unit.
        embedding: of a root with the embedding.
        head: of a root with norm and head.
        both: of a root with embedding, norm and head.
    """

    layer: UnitLayouts
    embedding: UnitLayouts
    head: UnitLayouts
    both: UnitLayouts

    def units(self, part: Part) -> list[UnitLayouts]:
        """Units of a stage in FlatFSDP's order: the root, with everything outside layers, then the layers."""
        roots = {(True, True): self.both, (True, False): self.embedding, (False, True): self.head}
        return [roots.get(part[1:], ()), *[self.layer] * part.layers]


def layouts_of(job: Job) -> Layouts:
    """Packs the parts of the job's model.

    Raises:
        ValueError: if sizes do not divide evenly over the tensor-parallel ranks, or do not suit FP8.
    """
    # Layouts do not depend on sequence length and depth.
    config, ranks = replace(job.model, layers=1, seq=1), job.ranks
    model = _model(config, ranks.tp, ranks.sequence_parallel)
    if ranks.sequence_parallel:
        model.parallel.share("Llama", "the sequence length", job.model.seq)
    if job.is_fp8:
        model.require_fp8_shapes(job.tokens)
    return _layouts(config, ranks.tp, ranks.sequence_parallel, job.packs_fp8)


@cache
def _model(config: LlamaConfig, tp: int, sequence_parallel: bool) -> Llama:
    return Llama(config, tp_size=tp, sequence_parallel=sequence_parallel, device="meta")


@cache
def _layouts(config: LlamaConfig, tp: int, sequence_parallel: bool, packs_fp8: bool) -> Layouts:
    model = _model(config, tp, sequence_parallel)
    (layer,) = model.layers.values()
    assert model.embedding is not None and model.norm is not None and model.head is not None
    table = list(model.embedding.parameters())
    head = [*model.norm.parameters(), *model.head.parameters()]

    def pack(owner: nn.Module, parameters: Iterable[nn.Parameter]) -> UnitLayouts:
        bindings = bindings_of(owner, parameters, Ranks(None, tp, 0), fp8=packs_fp8)
        return tuple(binding.layout for binding in bindings)

    return Layouts(
        layer=pack(layer, layer.parameters()),
        embedding=pack(model, table),
        head=pack(model, head),
        both=pack(model, table + head),
    )
