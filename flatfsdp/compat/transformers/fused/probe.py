"""The numeric probe: compares a tiny fused layer with transformers' own.

In:   a family, and the configuration of a model of any size, on any device.
Out:  the parts that differ, and how: another version of transformers, or replaced code.

The twin has the model's classes, head size, biases, rotation and activation, and small sizes otherwise; it
runs on the CPU in FP32.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from flatfsdp.compat.transformers.fused.families import Family, PartKind

TOLERANCE = 1e-5
"""Largest relative error of results and gradients, in Frobenius norms; in FP32 our kernels differ by 1e-6."""

BATCH, SEQUENCE, VOCABULARY = 2, 8, 48

Fusing = Callable[[nn.Module, set[PartKind]], None]
"""Fuses these parts of a twin in place."""


def differing(family: Family, config: Any, fuse_parts: Fusing) -> dict[PartKind, str]:
    """The parts that must not be fused, with reasons."""
    found: dict[PartKind, str] = {}
    with _apart():
        try:
            tiny = _shrunk(config)
            layer, rotary = family.find("layer")(tiny, layer_idx=0), family.find("rotary")
            twin = nn.ModuleDict({"layer": layer} | ({} if rotary is None else {"rotary": rotary(tiny)}))
            twin.hidden_size = tiny.hidden_size
            model = family.find("causal_lm")(tiny)
        except Exception as error:
            return {"layer": f"no small one can be made to compare with ({error!r})"}
        parts: tuple[PartKind, ...] = ("norm", "attention", "mlp") if family.mlp else ("norm", "attention")
        for part in parts:
            if reason := _compared(twin, {"norm", "rotary", "layer", part}, fuse_parts, _run_layer):
                found[part] = reason
                if part == "norm":
                    return found
        if reason := _compared(model, {"head", "causal_lm", "embedding"}, fuse_parts, _run_model):
            found["causal_lm"] = reason
        if family.model and (reason := _compared(model, {"layer", "model"}, fuse_parts, _run_model)):
            found["model"] = reason
    return found


@contextmanager
def _apart() -> Iterator[None]:
    """Context isolated from its surroundings: devices, dtypes, generators, autocast."""
    dtype = torch.get_default_dtype()
    with (
        torch.random.fork_rng(devices=[]),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
        torch.device("cpu"),
    ):
        torch.set_default_dtype(torch.float32)
        torch.manual_seed(0)
        try:
            yield
        finally:
            torch.set_default_dtype(dtype)


def _shrunk(config: Any) -> Any:
    tiny = copy.deepcopy(config)
    heads = tiny.num_attention_heads
    head_dim = getattr(tiny, "head_dim", None) or tiny.hidden_size // heads
    groups = getattr(tiny, "num_key_value_heads", None) or heads
    few = min(groups, 2)
    sizes = {
        "num_key_value_heads": few,
        "num_attention_heads": few * min(heads // groups, 2),
        "head_dim": head_dim,
        "intermediate_size": 48,
        "n_inner": 48,
        "num_hidden_layers": 1,
        "layer_types": (getattr(tiny, "layer_types", None) or [None])[:1],
        "vocab_size": VOCABULARY,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "use_cache": False,
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")),
        **dict.fromkeys(("attention_dropout", "attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0),
    }
    sizes["hidden_size"] = sizes["num_attention_heads"] * head_dim
    for name, value in sizes.items():
        if hasattr(tiny, name):
            setattr(tiny, name, value)
    if tiny._attn_implementation not in ("eager", "sdpa"):
        tiny._attn_implementation = "sdpa"
    return tiny


def _compared(
    twin: nn.Module, parts: set[PartKind], fuse_parts: Fusing, run: Callable[[Any], Tensor]
) -> str | None:
    """The error of results and gradients if `parts` are fused, as a message; None if it is small enough."""
    twin = twin.train().float()
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.normal_(mean=1.0 if parameter.dim() == 1 else 0.0, std=0.1)
    expected = _results(copy.deepcopy(twin), run)
    fused = copy.deepcopy(twin)
    try:
        fuse_parts(fused, parts)
        found = _results(fused, run)
    except Exception as error:
        return f"fused, a small one raises {error!r}"
    largest = max(float(each.norm()) for each in expected[1:])
    errors = [
        float((one - other).norm() / (other.norm() + 0.1 * largest))
        for one, other in zip(found, expected, strict=True)
    ]
    worst = max(errors)
    # Written so that NaN fails.
    return None if worst <= TOLERANCE else f"a small one, fused, is off by {worst:.1e}"


def _results(twin: nn.Module, run: Callable[[Any], Tensor]) -> Sequence[Tensor]:
    """The twin's result, and the gradients of its parameters."""
    out = run(twin)
    torch.manual_seed(1)
    out.backward(torch.randn_like(out))
    grads = [parameter.grad for parameter in twin.parameters()]
    return [out.detach(), *(grad for grad in grads if grad is not None)]


def _run_layer(twin: Any) -> Tensor:
    torch.manual_seed(2)
    layer = twin["layer"]
    hidden_states = torch.randn(BATCH, SEQUENCE, twin.hidden_size)
    positions = torch.arange(SEQUENCE)[None]
    arguments: dict[str, Any] = {"attention_mask": None, "position_ids": positions}
    if "rotary" in twin:
        arguments["position_embeddings"] = twin["rotary"](hidden_states, positions)
    out: Tensor = layer(hidden_states, **arguments)
    return out


def _run_model(model: Any) -> Tensor:
    torch.manual_seed(2)
    ids = torch.randint(0, VOCABULARY, (BATCH, SEQUENCE))
    loss: Tensor = model(input_ids=ids, labels=ids).loss
    return loss
