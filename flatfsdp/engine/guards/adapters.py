"""Refuses adapters that replace a parameter in every forward: PEFT's LoRA of parameters, as of MoE routers.

In:   a module below one that becomes a unit.
Out:  ValueError before the unit takes its parameters, which says what to adapt instead.
"""

from __future__ import annotations

from torch import nn


def refuse_adapter_of_parameter(name: str, module: nn.Module) -> None:
    """Checks a module before a unit takes its parameters.

    Raises:
        ValueError: if PEFT adapts a parameter of it, rather than a layer.
    """
    kind = type(module)
    if kind.__name__ != "ParamWrapper" or not kind.__module__.startswith("peft."):
        return
    base = type(module.get_base_layer()).__name__  # type: ignore[operator]
    raise ValueError(
        f"PEFT adapts a parameter of {name or 'the module'} ({module.parameter_name} of a {base}): in each "
        "forward it takes the parameter away and puts another one in its place, which would not be the "
        'gathered one. Adapt linear layers, as in target_modules=["q_proj", "v_proj"], and no routers or '
        'experts: "all-linear" includes routers, and target_parameters are such ones'
    )
