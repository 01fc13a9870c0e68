"""`fuse` and `unfuse`: which modules of a model are fused, and when that is too late.

In:   a model of transformers, before FlatFSDP shards it.
Out:  the same model, of the same classes by name, with the same parameters.
Next: `families.py` knows the classes; `layer.py` and `head.py` compute.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, TypeVar

from torch import nn

from flatfsdp.compat.transformers.attention import FusedAttention
from flatfsdp.compat.transformers.families import FAMILIES, Family, family_of
from flatfsdp.compat.transformers.fused_part import FusedPart, Fusion, become, is_fused, name_of, resign
from flatfsdp.compat.transformers.head import FusedCausalLM, FusedHead
from flatfsdp.compat.transformers.layer import FusedLayer
from flatfsdp.compat.transformers.mlp import FusedMLP
from flatfsdp.compat.transformers.operands import declare_stored, undeclare_stored
from flatfsdp.compat.transformers.small import FusedEmbedding, FusedNorm, FusedRotary
from flatfsdp.contract.claimed import is_owned, is_unit
from flatfsdp.contract.mixed import innermost
from flatfsdp.matmul.linear_map import FuseWgrad

M = TypeVar("M", bound=nn.Module)


def fuse(
    model: M,
    *,
    fp8: bool = True,
    fuse_wgrad_accumulation: FuseWgrad | None = None,
    head_chunk_tokens: int | None = None,
) -> M:
    """Lets our kernels compute a model of Hugging Face transformers, in place.

        model = fuse(AutoModelForCausalLM.from_pretrained(name))
        model = shard(model, by_class(LlamaDecoderLayer))

    Llama, Mistral, Qwen2, Qwen3, GPT-2, and of Mixtral all but the experts.  Norms, projections, rotation,
    attention, perceptrons, residuals, the head and the loss are fused; query, key and value are one GEMM, and
    so are gate and linear part.  Modules, parameters, names, the configuration and what is saved stay as they
    are.  A half of a layer with something that is not fused, such as a hook or an activation without a
    kernel, is left to transformers, and logged once.  So is a whole layer that writes text with a cache.

    In training, a model that is given labels returns no logits, unless called with `skip_logits=False`.

    Args:
        model: on any device, "meta" too; may have LoRA adapters inside, now or later.
        fp8: whether GEMMs inside the layers are in FP8 within `flatfsdp.fp8.autocast`; the head's never are.
        fuse_wgrad_accumulation: see `flatfsdp.layers.Linear`; default: where an engine has a main_grad.
        head_chunk_tokens: see `chunk_tokens` of `flatfsdp.layers.LinearCrossEntropy`.

    Returns:
        `model`.

    Raises:
        ValueError: if the model is fused already, or sharded, or has nothing that is fused.
    """
    _require_new(model)
    fusion = Fusion(
        fp8,
        "if_claimed" if fuse_wgrad_accumulation is None else fuse_wgrad_accumulation,
        head_chunk_tokens,
    )
    found = list(dict.fromkeys(_found_in(model)))
    if not any(each.mixin is FusedLayer for each in found):
        known = ", ".join(family.layer for family in FAMILIES)
        raise ValueError(
            f"fuse: {name_of(model)} has no layer that is fused; known are {known}, of transformers' own classes"
        )
    for each in found:
        become(each.module, each.mixin, each.family, fusion)
    for each in found:
        if isinstance(each.module, FusedAttention | FusedMLP):
            declare_stored(each.module, _projections(each.module, each.family))
    return model


def unfuse(model: M) -> M:
    """Gives all modules of a model back to transformers; parameters and buffers of transformers stay.

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
        if isinstance(module, FusedAttention | FusedMLP):
            undeclare_stored(_projections(module, module._family))
        resign(module)
    return model


def _require_new(model: nn.Module) -> None:
    if any(is_fused(module) for module in model.modules()):
        raise ValueError(f"fuse: {name_of(model)} is fused already; unfuse it first")
    _require_unsharded(model, "fuse first, then shard: the parts of a joint weight need places side by side")


def _require_unsharded(model: nn.Module, way_out: str) -> None:
    for name, module in model.named_modules():
        if is_unit(module) or is_owned(module):
            raise ValueError(f"{name or name_of(model)} is sharded already; {way_out}")


class _Found(NamedTuple):
    """A module, and what comes in front of its class."""

    module: nn.Module
    mixin: type[FusedPart]
    family: Family


def _found_in(model: nn.Module) -> Iterator[_Found]:
    for module in model.modules():
        if family := family_of(module, "layer"):
            yield _Found(module, FusedLayer, family)
            yield from _parts_of(module, family)
        elif family := family_of(module, "norm"):
            yield _Found(module, FusedNorm, family)
        elif family := family_of(module, "rotary"):
            yield _Found(module, FusedRotary, family)
        elif family := family_of(module, "causal_lm"):
            yield from _around(module, family)


def _parts_of(layer: nn.Module, family: Family) -> Iterator[_Found]:
    """The halves of a layer."""
    attention, mlp = layer._modules[family.attention_at], layer._modules[family.mlp_at]
    assert attention is not None and mlp is not None
    if family_of(attention, "attention") is family:
        yield _Found(attention, FusedAttention, family)
    if family_of(mlp, "mlp") is family:
        yield _Found(mlp, FusedMLP, family)
    if not family.norm:
        for name in family.norms_at:
            norm = layer._modules[name]
            if norm is not None and type(norm) is nn.LayerNorm and norm.weight is not None:
                yield _Found(norm, FusedNorm, family)


def _around(model: Any, family: Family) -> Iterator[_Found]:
    """The model itself, its head and its table of tokens."""
    head = model.get_output_embeddings()
    if type(head) is nn.Linear and head.bias is None:
        yield _Found(head, FusedHead, family)
        yield _Found(model, FusedCausalLM, family)
    table = getattr(getattr(model, family.base), family.embedding)
    if type(table) is nn.Embedding and table.max_norm is None and not (table.sparse or table.scale_grad_by_freq):
        yield _Found(table, FusedEmbedding, family)


def _projections(half: nn.Module, family: Family) -> list[nn.Module]:
    """The modules whose weights a half multiplies with."""
    from flatfsdp.compat.transformers import lora

    names = (*family.qkv, family.out) if isinstance(half, FusedAttention) else (*family.gate_up, family.down)
    return [lora.base_of(half._modules[name]) for name in names]
