"""`fuse` and `unfuse`: choose and change the modules of a model that our kernels compute.

In:   a model of transformers, before FlatFSDP shards it.
Out:  the same model, of the same classes by name, with the same parameters.
Next: `families.py` knows the classes; `layer.py` and `head.py` compute.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, TypeVar

from torch import nn

from flatfsdp.compat.transformers.fused.attention import FusedAttention
from flatfsdp.compat.transformers.fused.families import FAMILIES, Family, PartKind, family_of
from flatfsdp.compat.transformers.fused.fused_part import (
    FusedPart,
    FusionState,
    become,
    is_fused,
    name_of,
    resign,
)
from flatfsdp.compat.transformers.fused.head import FusedCausalLM, FusedHead
from flatfsdp.compat.transformers.fused.layer import FusedLayer
from flatfsdp.compat.transformers.fused.mlp import FusedMLP
from flatfsdp.compat.transformers.fused.model import FusedModel
from flatfsdp.compat.transformers.fused.probe import differing
from flatfsdp.compat.transformers.fused.small import FusedEmbedding, FusedNorm, FusedRotary, is_layer_norm
from flatfsdp.contract.claimed import is_owned, is_unit
from flatfsdp.matmul.linear_map import FuseWgrad

M = TypeVar("M", bound=nn.Module)


def fuse(
    model: M,
    *,
    fp8: bool = True,
    fuse_wgrad_accumulation: FuseWgrad | None = None,
    head_chunk_tokens: int | None = None,
) -> M:
    """Makes our kernels compute a model of Hugging Face transformers, in place.

        model = fuse(AutoModelForCausalLM.from_pretrained(name))
        model = shard(model, by_class(LlamaDecoderLayer))

    Supports Llama, Mistral, Qwen2, Qwen3, GPT-2, and Mixtral except for its experts.  Norms, projections,
    rotation, attention, MLPs, residuals, the head and the loss are fused; query, key and value are one GEMM,
    and so are gate and linear part.  Modules, parameters, names, the configuration and checkpoints stay
    unchanged.  Half a layer with an unsupported part, such as a hook or an activation without a kernel, is
    left to transformers, which is logged once.  So is a whole layer during generation with a cache.

    In training, a model called with labels returns no logits, unless called with `skip_logits=False`.

    Args:
        model: on any device, including "meta"; LoRA adapters may be added before or after.
        fp8: whether GEMMs inside the layers run in FP8 within `flatfsdp.fp8.autocast`; the head's never do.
        fuse_wgrad_accumulation: add weight gradients to FP32 `main_grad` buffers in the GEMM; default: for
            weights that an engine manages.
        head_chunk_tokens: tokens whose logits exist at a time; None keeps all logits until backward.

    Returns:
        `model`.

    Raises:
        ValueError: if the model is already fused or sharded, or has no part that can be fused.
    """
    _require_new(model)
    fusion = FusionState(
        fp8, "if_claimed" if fuse_wgrad_accumulation is None else fuse_wgrad_accumulation, head_chunk_tokens
    )
    found = _parts_in(model)
    if not any(each.part == "layer" for each in found):
        known = ", ".join(family.layer for family in FAMILIES)
        raise ValueError(
            f"fuse: {name_of(model)} has no layer that is fused; known are transformers' own {known}; "
            "shard any other model without it"
        )
    found = _without_differing(found, fusion)
    for each in found:
        become(each.module, _PARTS[each.part][0], each.family, fusion)
    return model


def unfuse(model: M) -> M:
    """Restores transformers' own computation; parameters and buffers of transformers stay.

    Returns:
        `model`.

    Raises:
        ValueError: if the model is sharded, or not fused.
    """
    fused = [module for module in model.modules() if is_fused(module)]
    if not fused:
        raise ValueError(f"unfuse: {name_of(model)} is not fused")
    _require_unsharded(model, "unfuse it before it is sharded, or take the state_dict()")
    for module in fused:
        resign(module)
    return model


def _require_new(model: nn.Module) -> None:
    if any(is_fused(module) for module in model.modules()):
        raise ValueError(f"fuse: {name_of(model)} is fused already; unfuse it first")
    _require_unsharded(model, "fuse first, then shard: the parts of a packed weight need places side by side")


def _require_unsharded(model: nn.Module, way_out: str) -> None:
    for name, module in model.named_modules():
        if any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__):
            raise ValueError(f"{name or name_of(model)} is sharded by fully_shard already; {way_out}")
        if is_unit(module) or is_owned(module):
            raise ValueError(f"{name or name_of(model)} is sharded already; {way_out}")


class _Found(NamedTuple):
    """A module, and its part in its family."""

    module: nn.Module
    part: PartKind
    family: Family


_PARTS: dict[PartKind, tuple[type[FusedPart], set[PartKind]]] = {
    "layer": (FusedLayer, {"layer", "norm"}),
    "attention": (FusedAttention, {"attention", "layer", "norm"}),
    "mlp": (FusedMLP, {"mlp", "layer", "norm"}),
    "norm": (FusedNorm, {"norm", "layer"}),
    "rotary": (FusedRotary, {"attention", "layer", "norm"}),
    "embedding": (FusedEmbedding, {"causal_lm", "layer"}),
    "model": (FusedModel, {"model", "layer", "norm"}),
    "head": (FusedHead, {"causal_lm", "layer"}),
    "causal_lm": (FusedCausalLM, {"causal_lm", "layer"}),
}
"""The mixin of each part, and the parts that have to pass the probe for it to be fused."""


def _parts_in(model: nn.Module) -> list[_Found]:
    return list(dict.fromkeys(each for module in model.modules() for each in _parts_at(module)))


def _parts_at(module: nn.Module) -> Iterator[_Found]:
    for part in ("layer", "norm", "rotary", "model", "causal_lm"):
        family = family_of(module, part)
        if family is not None:
            yield _Found(module, part, family)
            if part == "layer":
                yield from _halves(module, family)
            elif part == "causal_lm":
                yield from _ends(module, family)


def _halves(layer: Any, family: Family) -> Iterator[_Found]:
    attention, mlp = getattr(layer, family.attention_at), getattr(layer, family.mlp_at)
    if family_of(attention, "attention") is family:
        yield _Found(attention, "attention", family)
    if family_of(mlp, "mlp") is family:
        yield _Found(mlp, "mlp", family)
    if not family.norm:
        for norm in (getattr(layer, name) for name in family.norms_at):
            if is_layer_norm(norm):
                yield _Found(norm, "norm", family)


def _ends(model: Any, family: Family) -> Iterator[_Found]:
    """The head and the token embedding."""
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    if type(head) is nn.Linear and head.bias is None:
        yield _Found(head, "head", family)
    is_plain = type(table) is nn.Embedding and table.max_norm is None
    if is_plain and not (table.sparse or table.scale_grad_by_freq):
        yield _Found(table, "embedding", family)


def _without_differing(found: list[_Found], fusion: FusionState) -> list[_Found]:
    """Drops the parts whose results the probe finds to differ from ours."""
    layers = {
        (each.family, id(config)): config
        for each in found
        if each.part == "layer"
        for config in [getattr(each.module, each.family.attention_at).config]
    }
    for (family, _), config in layers.items():
        for part, reason in differing(family, config, _fuse_twin).items():
            fusion.say(getattr(family, part) or "LayerNorm", reason)
            fusion.left_out.add((family.name, part))
    differ = fusion.left_out
    return [each for each in found if not any((each.family.name, p) in differ for p in _PARTS[each.part][1])]


def _fuse_twin(twin: nn.Module, parts: set[PartKind]) -> None:
    fusion = FusionState(fp8=False, fuse_wgrad_accumulation=False, head_chunk_tokens=None, speaks=False)
    for each in _parts_in(twin):
        if each.part in parts:
            become(each.module, _PARTS[each.part][0], each.family, fusion)
