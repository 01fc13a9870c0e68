"""The bytes that each engine's design promises for one optimizer step: the formulas of `bytes.py`.

In:   a `Case`, the number of ranks and of microbatches.
Out:  its `Traffic`.
Next: `bytes_measured.py` puts a measurement beside it.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Literal

UNITS, WIDTH, HIDDEN = 4, 256, 512
WEIGHTS = UNITS * 2 * WIDTH * HIDDEN
COMPUTE_BYTES = 2  # bf16
FP8_BYTES = 1
MASTER_BYTES = 4  # FP32; also what gradients are accumulated and reduced in


@dataclass(frozen=True)
class Case:
    """An engine with its settings.

    Attributes:
        zero: 3 frees parameters after each forward and backward, 2 keeps them for a step.
        sync: whether gradients are reduced in the last microbatch or in every one.
        concat_free: FlatFSDP's `optimize_backward_concat`.
        fp8: whether weights are gathered, and multiplied, in FP8.
    """

    engine: Literal["FlatFSDP", "FSDP2", "fairscale"]
    zero: Literal[2, 3]
    sync: Literal["last", "every"] = "last"
    concat_free: bool = True
    fp8: bool = False

    @property
    def runs_here(self) -> bool:
        """Whether it can be measured here."""
        if self.engine == "FSDP2" and self.fp8:
            return importlib.util.find_spec("torchao") is not None
        return self.engine != "fairscale"

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        return WEIGHTS + (UNITS * WIDTH if self.fp8 else 0)

    @property
    def weights_share(self) -> float:
        """Share of the parameters that are not a norm's."""
        return WEIGHTS / self.parameters


CASES = (
    Case("FlatFSDP", zero=3),
    Case("FlatFSDP", zero=2),
    Case("FlatFSDP", zero=3, concat_free=False),
    Case("FlatFSDP", zero=2, concat_free=False),
    Case("FlatFSDP", zero=3, sync="every"),
    Case("FSDP2", zero=3, sync="every"),
    Case("FSDP2", zero=2, sync="every"),
    Case("FSDP2", zero=3, sync="last"),
    Case("FSDP2", zero=2, sync="last"),
    Case("FlatFSDP", zero=3, fp8=True),
    Case("FlatFSDP", zero=2, fp8=True),
    Case("FSDP2", zero=3, fp8=True),
    Case("FSDP2", zero=2, fp8=True),
    Case("fairscale", zero=3),
    Case("fairscale", zero=2),
)

LOCAL = ("cast", "amax", "transpose", "copy", "concat", "accumulate", "other")
"""The parts of a `Traffic` that are local bytes."""


@dataclass(frozen=True)
class Traffic:
    """One step of one case; bytes per parameter, calls per unit.

    Attributes:
        cast: master shards to bf16 or FP8.
        amax: reads of master shards for the scales of FP8 weights.
        transpose: FP8 weights, for the GEMMs of the backward.
        copy: into and out of all-gather buffers.
        concat: gradients into one flat tensor.
        accumulate: gradients widened to FP32 and added up.
        other: scaling, clamping and zero-fill: casts to FP8 in several kernels, divisions by N.
        gathers, reduces: all-gather and reduce-scatter calls per unit.
        wire_gather, wire_reduce: bytes per parameter that a rank sends.
    """

    cast: float
    amax: float
    transpose: float
    copy: float
    concat: float
    accumulate: float
    other: float
    gathers: float
    reduces: float
    wire_gather: float
    wire_reduce: float

    @property
    def local(self) -> float:
        """The sum of the local bytes."""
        return sum(getattr(self, part) for part in LOCAL)


def promised(case: Case, ranks: int, steps: int) -> Traffic:
    """The formula row of `case` for N ranks and `steps` microbatches."""
    gathers = 2 * steps if case.zero == 3 else 1
    reduces = steps if case.sync == "every" else 1
    on_wire = (ranks - 1) / ranks
    gathered, reduced = COMPUTE_BYTES * 1.0, MASTER_BYTES * 1.0
    if case.fp8:
        # FlatFSDP sends norms in separate buffers, which are too small to be counted.
        weights, norms = case.weights_share, 1 - case.weights_share
        gathered = FP8_BYTES * weights + (0 if case.engine == "FlatFSDP" else COMPUTE_BYTES * norms)
        reduced *= weights if case.engine == "FlatFSDP" else 1
    local = dict.fromkeys(LOCAL, 0.0) | _LOCAL_BYTES[case.engine, case.fp8](case, ranks, steps)
    return Traffic(
        **local,
        gathers=gathers,
        reduces=reduces,
        wire_gather=gathers * gathered * on_wire,
        wire_reduce=reduces * reduced * on_wire,
    )


def _flat_local(case: Case, ranks: int, steps: int) -> dict[str, float]:
    """FlatFSDP: one cast per step, gathered in place; gradients land in the buffer that is reduced."""
    p, m = COMPUTE_BYTES, MASTER_BYTES
    reduces = steps if case.sync == "every" else 1
    # The first gradient after a reduction is copied, the others are added; so are reduced shards.
    landed = reduces * (p + m) + (steps - reduces) * (p + 2 * m) + (reduces - 1) * 3 * m / ranks
    return {
        "cast": (m + p) / ranks,
        "concat": 0 if case.concat_free else 2 * p * steps,
        "accumulate": landed,
    }


def _flat_fp8_local(case: Case, ranks: int, steps: int) -> dict[str, float]:
    """FlatFSDP in FP8: one cast to FP8, transposes while weights stay; GEMMs write gradients."""
    p, m, weights = FP8_BYTES, MASTER_BYTES, case.weights_share
    unshards = steps if case.zero == 3 else 1
    return {
        "cast": weights * (m + p) / ranks,
        "amax": weights * m / ranks,
        "transpose": weights * unshards * 2 * p,
    }


def _fsdp2_local(case: Case, ranks: int, steps: int) -> dict[str, float]:
    """FSDP2: cast, copy in, copy out at every gather; a rank-major concat at every reduction."""
    p, m = COMPUTE_BYTES, MASTER_BYTES
    gathers = 2 * steps if case.zero == 3 else 1
    if case.sync == "every":
        concat, accumulate = steps * (p + m), (steps - 1) * 3 * m / ranks
    elif steps == 1:
        concat, accumulate = p + m, 0.0
    else:
        concat, accumulate = 2 * m, (p + m) + (steps - 1) * (p + 2 * m)
    return {
        "cast": gathers * (m + p) / ranks,
        "copy": gathers * (2 * p / ranks + 2 * p),
        "concat": concat,
        "accumulate": accumulate,
    }


def _fsdp2_fp8_local(case: Case, ranks: int, steps: int) -> dict[str, float]:
    """FSDP2 with torchao's weights: scaled, clamped and cast at every gather, measured once a step."""
    p, m, weights = FP8_BYTES, MASTER_BYTES, case.weights_share
    gathers = 2 * steps if case.zero == 3 else 1
    in_bf16 = _fsdp2_local(case, ranks, steps)
    gathered = p * weights + COMPUTE_BYTES * (1 - weights)
    return {
        "cast": weights * gathers * (m + p) / ranks,
        "amax": weights * m / ranks,
        "transpose": weights * steps * 2 * p,
        "copy": gathers * (2 * gathered / ranks + 2 * gathered),
        "concat": in_bf16["concat"],
        "accumulate": weights * in_bf16["accumulate"],
        "other": weights * gathers * 2 * 2 * m / ranks,
    }


def _fairscale_local(case: Case, ranks: int, steps: int) -> dict[str, float]:
    """Fairscale 0.4.13: a cast at every gather, gathered in place, and concatenated gradients.

    They are added up in bf16, widened in the last microbatch, and divided before and after the reduction into
    zeros.
    """
    p, m = COMPUTE_BYTES, MASTER_BYTES
    gathers = 2 * steps if case.zero == 3 else 1
    divided_after = 2 * m / ranks if ranks > 2 else 0.0
    return {
        "cast": gathers * (m + p) / ranks,
        "concat": steps * 2 * p,
        "accumulate": (steps - 1) * 3 * p + (p + m),
        "other": 2 * m + m / ranks + divided_after,
    }


_LOCAL_BYTES = {
    ("FlatFSDP", False): _flat_local,
    ("FlatFSDP", True): _flat_fp8_local,
    ("FSDP2", False): _fsdp2_local,
    ("FSDP2", True): _fsdp2_fp8_local,
    ("fairscale", False): _fairscale_local,
}
"""Formulas by engine, and whether weights are in FP8; missing parts are 0."""
