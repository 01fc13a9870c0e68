"""`init_weights_of`: initial values for a Hugging Face model that was built on the meta device.

In:   a model built inside `torch.device("meta")`, possibly with LoRA.
Out:  a function for `param_init_fn`, which is called unit by unit.

    what                        by
        modules of a model          the `_init_weights` of the innermost PreTrainedModel around them, also for
                                    buffers such as rotary frequencies
    LoRA adapters               the `reset_lora_parameters` of the layer that they adapt
    modules around the model    their own `reset_parameters`
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from flatfsdp.flat.meta_device import ParamInit


def init_weights_of(model: nn.Module) -> ParamInit:
    """The `param_init_fn` for a Hugging Face model on the meta device.

        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        model = shard(model, policy_of(model), device="cuda", param_init_fn=init_weights_of(model))

    Values have transformers' distributions, but differ from those of a model built directly with the same
    seed. Seed all ranks alike.

    Args:
        model: a model of transformers, or a module that contains some, such as a PEFT model, complete and
            ready to be sharded.

    Raises:
        ValueError: if it contains no model of transformers; if adapters on the meta device derive their
            values from the weights that they adapt.  The returned function raises it for modules added later.
    """
    init = _InitWeights(model)
    if not any(init.model_of.values()):
        name = type(model).__name__
        raise ValueError(f"{name} is no model of transformers; give shard a param_init_fn of your own")
    return init


class _InitWeights:
    """Initialises the modules of one model.

    Attributes:
        model_of: the innermost model of transformers around each module, possibly itself; None if there is
            none.
        adapter_of: what initialises the adapter that a module is part of.
    """

    after_children = True

    def __init__(self, model: nn.Module) -> None:
        self.model_of: dict[nn.Module, Any] = {}
        self.adapter_of: dict[nn.Module, Callable[[], None]] = {}
        self._visit("", model, None, {})

    def __call__(self, module: nn.Module) -> None:
        if module in self.adapter_of:
            self.adapter_of[module]()
            return
        if module not in self.model_of:
            cause = "was not there when init_weights_of(model) was called"
            raise ValueError(f"this {type(module).__name__} {cause}; call it just before shard")
        model = self.model_of[module]
        if model is not None:
            model._init_weights(module)
        elif module._parameters or module._buffers:
            reset: Any = getattr(module, "reset_parameters", None)
            if reset is None:
                name = type(module).__name__
                raise ValueError(
                    f"a {name} around the model is on the meta device, without reset_parameters()"
                )
            reset()

    def _visit(self, path: str, module: nn.Module, model: Any, configs: dict[str, Any]) -> None:
        """Visits a module and its children.

        Args:
            path: name of the module.
            module: the module.
            model: the innermost model of transformers around it.
            configs: configurations of the model's adapters, by name.
        """
        if hasattr(type(module), "_init_weights"):
            model = module
        self.model_of.setdefault(module, model)
        configs = getattr(module, "peft_config", None) or configs
        is_adapted = "base_layer" in module._modules
        for name, child in module.named_children():
            if is_adapted and name != "base_layer":
                self._visit_adapters(f"{path}.{name}".lstrip("."), module, child, configs)
            else:
                self._visit(f"{path}.{name}".lstrip("."), child, model, configs)
        if "original_module" in module._modules and any(each.is_meta for each in module.parameters()):
            raise ValueError(
                f"{path} is trained whole (modules_to_save), as a copy of what is on the meta device; build "
                "the model with values, or adapt the module instead"
            )

    def _visit_adapters(self, path: str, layer: Any, by_name: Any, configs: dict[str, Any]) -> None:
        """Visits one kind of parts of all adapters of a layer, such as `lora_A`."""
        for part in by_name.modules():
            self.model_of.setdefault(part, None)
        if not any(each.is_meta for each in by_name.parameters()):
            return
        for name in configs:
            how = getattr(configs[name], "init_lora_weights", None)
            is_lora = hasattr(layer, "reset_lora_parameters") and how in (True, "gaussian")
            if name not in by_name:
                continue
            if not is_lora or layer.lora_variant.get(name):
                raise ValueError(
                    f"{path}.{name} is an adapter on the meta device that gets no values before its base has "
                    "some; build the model with values, or use LoRA with init_lora_weights=True"
                )
            owner = by_name[name] if isinstance(by_name, nn.ModuleDict) else by_name
            self.adapter_of[owner] = partial(layer.reset_lora_parameters, name, how)
