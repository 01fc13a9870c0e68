"""The classes of transformers that can be fused, and the names of their parts.

A class counts only if its `forward` is its own: another library may have replaced it.
"""

from __future__ import annotations

import sys
from typing import Any, Literal, NamedTuple

from torch import nn

from flatfsdp.contract.mixed import innermost

PartKind = Literal["layer", "attention", "mlp", "norm", "rotary", "embedding", "model", "head", "causal_lm"]


class Family(NamedTuple):
    """One architecture of transformers.

    Attributes:
        name: name of its folder, `transformers.models.<name>`.
        layer, attention, mlp, causal_lm, norm, rotary, model: class names; "" if none is fused.
        attention_at, mlp_at, norms_at: attributes of the layer; the norms before attention and the MLP.
        qkv: attributes of attention whose weights are stacked into one operand.
        out: attribute of attention: the output projection.
        gate_up: attributes of the MLP that are one operand: gate and linear part, or the first map.
        down: attribute of the MLP: the second map.
        activation: attribute of the MLP.
        dropouts: attributes of attention and MLP: the nn.Dropout of their results.
        base: attribute of the causal language model: the model without its head.
        window: owner of `sliding_window`, which is passed to transformers' attention functions.
        output: class of `transformers.modeling_outputs` that the causal language model returns.
        transposed: whether weights are [in, out].
    """

    name: str
    layer: str
    attention: str
    mlp: str
    causal_lm: str
    norm: str = ""
    rotary: str = ""
    model: str = ""
    attention_at: str = "self_attn"
    mlp_at: str = "mlp"
    norms_at: tuple[str, str] = ("input_layernorm", "post_attention_layernorm")
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    out: str = "o_proj"
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    down: str = "down_proj"
    activation: str = "act_fn"
    dropouts: tuple[str, str] | None = None
    base: str = "model"
    window: Literal["attention", "config"] | None = None
    output: str = "CausalLMOutputWithPast"
    transposed: bool = False

    def find(self, part: PartKind) -> Any:
        """The class of a part; None if the family has none, or its module is not imported."""
        name = getattr(self, part)
        modeling = sys.modules.get(self.module)
        return getattr(modeling, name, None) if name else None

    @property
    def module(self) -> str:
        """The module that defines its classes."""
        return f"transformers.models.{self.name}.modeling_{self.name}"


def _like_llama(name: str, prefix: str, **others: Any) -> Family:
    kinds = ("DecoderLayer", "Attention", "MLP", "ForCausalLM", "RMSNorm", "RotaryEmbedding", "Model")
    names: list[Any] = [f"{prefix}{kind}" for kind in kinds]
    return Family(name, *names)._replace(**others)


FAMILIES = (
    _like_llama("llama", "Llama"),
    _like_llama("mistral", "Mistral", window="config"),
    _like_llama("qwen2", "Qwen2", window="attention"),
    _like_llama("qwen3", "Qwen3", window="attention"),
    _like_llama("mixtral", "Mixtral", mlp="", window="config", output="MoeCausalLMOutputWithPast"),
    Family(
        name="gpt2",
        layer="GPT2Block",
        attention="GPT2Attention",
        mlp="GPT2MLP",
        causal_lm="GPT2LMHeadModel",
        attention_at="attn",
        norms_at=("ln_1", "ln_2"),
        qkv=("c_attn",),
        out="c_proj",
        gate_up=("c_fc",),
        down="c_proj",
        activation="act",
        dropouts=("resid_dropout", "dropout"),
        base="transformer",
        output="CausalLMOutputWithCrossAttentions",
        transposed=True,
    ),
)


def family_of(module: nn.Module, part: PartKind) -> Family | None:
    """The family in which a module is this part; None if there is none, or its forward was replaced."""
    kind = innermost(type(module))
    for family in FAMILIES:
        if kind.__module__ == family.module and kind is family.find(part) and has_own_forward(module):
            return family
    return None


def has_own_forward(module: nn.Module) -> bool:
    """Whether a module's forward is that of its class, as far as can be seen without calling it."""
    kind = innermost(type(module))
    return "forward" not in vars(module) and kind.forward.__module__ == kind.__module__
