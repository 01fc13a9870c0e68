"""`FlatFSDP`: the wrapper class that users see.

In:   a module and options.
Out:  a module whose `parameters()` are flat shards that any optimizer can update.
Next: its `forward` drives `engine/step/driven_unit.py`; to follow one parameter, start at
      `engine/build/claim.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, NoReturn

from torch import Tensor, nn
from typing_extensions import Unpack

from flatfsdp.byte_ledger import ByteLedger
from flatfsdp.contract.foreign_words import OPTIONS, answering
from flatfsdp.contract.partners import ADAPTER_METHODS
from flatfsdp.engine.api.call import call_unit
from flatfsdp.engine.api.methods import UnitMethods
from flatfsdp.engine.build.unit import build_unit
from flatfsdp.engine.step.own_hooks import own_hook
from flatfsdp.engine.whole.full_params import whole_for_state_dict
from flatfsdp.flat.binding import Binding
from flatfsdp.flat.layout import ParamSlot
from flatfsdp.flat.module_wrapper import ModuleWrapper
from flatfsdp.flat.sites import parameter_sites
from flatfsdp.microbatch import Microbatch
from flatfsdp.policy import Options, require_known
from flatfsdp.torch_private import never_traced, traced_inside


class FlatFSDP(UnitMethods, ModuleWrapper):
    """Shards a module's parameters over ranks in one flat buffer, and gathers them where they are used.

    Takes every parameter below `module` that no inner FlatFSDP has taken, so wrap inner modules first
    (`flatfsdp.auto_wrap` does).  Each FlatFSDP is a unit: gathered, resharded and reduced as a whole.  One
    transformer layer is a good size.  The first one that is called becomes the root of those inside it.

    `parameters()` lists the flat FP32 shards; give them to any torch.optim optimizer after wrapping.  A
    parameter without a gradient in a reducing backward counts as one with a zero gradient.  Freeze and train
    units by `requires_grad_()`, at any time, on all ranks alike.

    Args:
        module: module to shard, the same on all ranks.
        options: ranks, dtypes and other settings, by name: see `Options`.

    Attributes:
        module: the wrapped module.  Attributes not found here are looked up there.
        microbatch: which microbatch this is; shared with the inner units of a root.
        ledger: counter of the bytes moved; shared with the inner units of a root.

    Raises:
        ValueError: for parameters that cannot be sharded, naming them: not floating point, tied to one in
            another unit, on a device that the backend cannot reach, on the meta device and not initialised,
            split over other ranks than tp_group, float64 or fp16 without `precision`.  If ranks of tp_group
            are data-parallel, too.
    """

    @answering(OPTIONS)
    def __init__(self, module: nn.Module, **options: Unpack[Options]) -> None:
        require_known("FlatFSDP", options)
        if not isinstance(module, nn.Module):
            raise TypeError(f"FlatFSDP wraps an nn.Module, not {module!r}")
        super().__init__(module)
        self.fsdp_state = build_unit(module, in_place=False, **options)
        for group in self.fsdp_state.groups:
            self._register_flat(group.flat_name, group.master.flat)
        module.register_forward_pre_hook(self._check_gathered)
        module.register_state_dict_pre_hook(self._check_whole)
        if hasattr(module, "peft_config") and hasattr(module, "save_pretrained"):
            # Past the wrapper it would write an adapter without tensors.
            vars(module)["save_pretrained"] = _refuse_to_save_adapters

    @property
    def microbatch(self) -> Microbatch:
        """The microbatch that the model is in."""
        return self.fsdp_state.shared.microbatch

    @property
    def ledger(self) -> ByteLedger:
        """Bytes that this rank has sent."""
        return self.fsdp_state.shared.ledger

    def __setattr__(self, name: str, value: Any) -> None:
        # Attributes set on the wrapper itself may be replaced; "module" does not exist before wrapping.
        is_new = isinstance(value, nn.Module) and name != "module" and name not in self._modules
        if is_new and hasattr(self, name):
            raise TypeError(
                f"{name} cannot be replaced after wrapping: the new module's parameters would be neither "
                "used nor reduced; replace it first, then wrap"
            )
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        if name in _FINDS_ADAPTERS and hasattr(self._modules.get("module"), "peft_config"):
            raise AttributeError(_adapters_message(name))
        if name == "save_pretrained":
            raise AttributeError(
                "save_pretrained of a wrapped model would write only a part of it, as the names of its "
                "modules have one level more: shard the model in place (flatfsdp.shard), or call "
                "model.module.save_pretrained(folder, state_dict=model.state_dict())"
            )
        return super().__getattr__(name)

    @traced_inside
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the wrapped module with whole parameters."""
        self._require_own_flats()
        return call_unit(self, self.module, args, kwargs)

    @never_traced
    def _require_own_flats(self) -> None:
        """Raises if a flat parameter was replaced by another tensor, which nothing would read."""
        state = self.fsdp_state
        for group in state.groups:
            if self._parameters.get(group.flat_name) is not group.master.flat and not state.is_whole:
                raise RuntimeError(
                    f"the flat parameter of unit {group.name} was replaced (by another engine around the "
                    "model, or torch.func.functional_call), and nothing would read what took its place; "
                    "write to it in place, and give functional_call a plain copy of the model"
                )

    @own_hook
    def _check_gathered(self, module: nn.Module, _inputs: Any) -> None:
        if self.fsdp_state.is_sharded:
            raise RuntimeError(
                f"the forward of {type(module).__name__} was called past its FlatFSDP, so its parameters are "
                "not gathered; call the FlatFSDP module, not its .module or a method that calls it: shard "
                "the model in place (flatfsdp.shard) to use its methods, such as generate()"
            )

    def _check_whole(self, module: nn.Module, _prefix: str, _keep_vars: bool) -> None:
        if not self.fsdp_state.is_whole:
            raise RuntimeError(
                f"state_dict of {type(module).__name__} was called past its FlatFSDP, and would be without "
                "the parameters of this unit; call it of the FlatFSDP module. PEFT's state dicts of adapters "
                "need a model that is sharded in place (flatfsdp.shard)"
            )

    # ---- checkpoints: the parts of ModuleWrapper's state_dict -------------------------------------------

    @property
    def bindings(self) -> list[Binding]:
        """The bindings of flat parameters to the modules."""
        state = self.fsdp_state
        return [] if state.is_whole else [group.binding for group in state.groups]

    def _registered_parameters(self) -> AbstractContextManager[None]:
        return whole_for_state_dict(self)

    def _load_slot(self, binding: Binding, slot: ParamSlot, value: Tensor) -> None:
        groups = self.fsdp_state.groups
        next(group for group in groups if group.binding is binding).master.load(slot, value)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Flat parameters by name, or ordinary ones inside `summon_full_params`."""
        if not (self.fsdp_state.is_whole and recurse):
            yield from super().named_parameters(prefix, recurse, remove_duplicate)
            return
        # By sites: wrappers inside would add a level to the names.
        seen: set[nn.Parameter] = set()
        for site, parameter in parameter_sites(self.module, f"{prefix}." if prefix else ""):
            if not remove_duplicate or parameter not in seen:
                seen.add(parameter)
                yield site.name, parameter


_FINDS_ADAPTERS = {"peft_config", "save_pretrained", *ADAPTER_METHODS}
"""Attributes through which PEFT finds modules by name."""


def _adapters_message(name: str) -> str:
    return (
        f"{name} of a wrapped PEFT model would not find its adapters, as the names of its modules have one "
        "level more: shard the model in place (flatfsdp.shard)"
    )


def _refuse_to_save_adapters(*_: Any, **__: Any) -> NoReturn:
    raise RuntimeError(_adapters_message("save_pretrained"))
