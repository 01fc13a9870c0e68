"""Sizes of a Llama, its split into pipeline stages, and the operations that a token costs.

Next: `llama.py` builds it.
"""

from __future__ import annotations

import json
from dataclasses import MISSING, dataclass, fields
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Literal

from flatfsdp.comm.paths import local_path

PresetName = Literal["tiny", "debug", "1b", "8b", "70b"]


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes of a Llama.

    Attributes:
        layers: number of layers.
        hidden: size of activations between layers.
        ffn: width of the gate and of the up projection each.
        heads: number of query heads.
        kv_heads: key/value heads, each shared by heads / kv_heads query heads.
        vocab: size of the vocabulary.
        seq: longest sequence, in tokens.
        rope_theta: wavelengths of positions are 2 pi to 2 pi * rope_theta tokens.
        norm_eps: added to the mean square in each norm.

    Raises:
        ValueError: if a size is not positive, or sizes do not fit each other.
    """

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    vocab: int
    seq: int
    rope_theta: float = 500_000.0
    norm_eps: float = 1e-5

    @staticmethod
    def load(path: Path) -> LlamaConfig:
        """Reads a JSON object with these fields.

        Raises:
            ValueError: if a size is missing, a name is unknown, or a value is not a number; if the path is a
                URL.
        """
        found = json.loads(local_path(path).read_text())
        names = {field.name: field.default is MISSING for field in fields(LlamaConfig)}
        if not isinstance(found, dict):
            raise ValueError(f"{path} is no JSON object; it must be one with {', '.join(names)}")
        for name, value in found.items():
            if name not in names or not isinstance(value, int | float):
                raise ValueError(f"{path}: {name} is {value!r}; it must have numbers of {', '.join(names)}")
        missing = [name for name, is_needed in names.items() if is_needed and name not in found]
        if missing:
            raise ValueError(f"{path} has no {', '.join(missing)}; a LlamaConfig needs them")
        return LlamaConfig(**found)

    def __post_init__(self) -> None:
        for field in fields(self):
            if not getattr(self, field.name) > 0:
                raise ValueError(f"{field.name} is {getattr(self, field.name)}; it must be positive")
        if self.hidden % (2 * self.heads):
            raise ValueError(f"hidden is {self.hidden}; it must be an even multiple of heads, {self.heads}")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads is {self.heads}; it must be a multiple of kv_heads, {self.kv_heads}")

    @property
    def head_dim(self) -> int:
        """Elements of a head."""
        return self.hidden // self.heads

    @property
    def layer_weights(self) -> int:
        """Number of weights in a layer's GEMMs."""
        key_and_value = 2 * self.kv_heads * self.head_dim
        return self.hidden * (2 * self.hidden + key_and_value) + 3 * self.hidden * self.ffn

    @property
    def head_layers(self) -> float:
        """Operations of the head, in units of a layer; counted as in `flops_per_token`."""
        return self.hidden * self.vocab / (self.layer_weights + self.hidden * self.seq)


PRESETS: dict[PresetName, LlamaConfig] = {
    "tiny": LlamaConfig(4, 64, 192, heads=4, kv_heads=2, vocab=256, seq=64),
    "debug": LlamaConfig(8, 256, 768, heads=8, kv_heads=4, vocab=256, seq=256),
    "1b": LlamaConfig(16, 2048, 8192, heads=32, kv_heads=8, vocab=128_256, seq=8192),
    "8b": LlamaConfig(32, 4096, 14_336, heads=32, kv_heads=8, vocab=128_256, seq=8192),
    "70b": LlamaConfig(80, 8192, 28_672, heads=64, kv_heads=8, vocab=128_256, seq=8192),
}
"""Llama 3's shapes, and two for tests on CPU with a vocabulary of bytes."""


def stage_layers(layers: int, stages: int, head_layers: float = 0.0) -> list[range]:
    """The layers of each pipeline stage, in order, so that the busiest stage has as little work as possible.

    Stages without the head differ by at most one layer; the first ones have more.

    Args:
        layers: number of layers.
        stages: number of stages.
        head_layers: additional work of the last stage, in layers: `LlamaConfig.head_layers`.

    Raises:
        ValueError: if a stage would have no layer.
    """
    if not 1 <= stages <= layers:
        raise ValueError(f"{layers} layers cannot be split into {stages} stages; each needs a layer")

    def split(last: int) -> list[int]:
        each, more = divmod(layers - last, stages - 1)
        return [each + (stage < more) for stage in range(stages - 1)] + [last]

    def work(last: int) -> tuple[float, float]:
        of_stages = [*split(last)[:-1], last + head_layers]
        return max(of_stages), sum(each * each for each in of_stages)

    sizes = [layers] if stages == 1 else split(min(range(1, layers - stages + 2), key=work))
    ends = [0, *accumulate(sizes)]
    return [range(begin, end) for begin, end in pairwise(ends)]


def flops_per_token(config: LlamaConfig, seq: int | None = None) -> int:
    """Operations of a forward and backward of the whole model, per token.

    They are 6 per weight of a GEMM (a multiply and an add, in forward, dgrad and wgrad), plus causal
    attention: 6 * layers * hidden * seq, half of attention without a mask.  Embedding, norms, the optimizer
    and recomputation do not count.

    Args:
        config: sizes of the model.
        seq: length of the sequences; default: the longest.
    """
    weights = config.layers * config.layer_weights + config.hidden * config.vocab
    return 6 * weights + 6 * config.layers * config.hidden * (config.seq if seq is None else seq)
