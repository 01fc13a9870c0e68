"""`FlattenParamsWrapper` under fairscale's names; everything else is `flatfsdp.FlattenParamsWrapper`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

import flatfsdp
from flatfsdp.flat.sites import parameter_sites

ParamGroups = Sequence[nn.Parameter] | Sequence[Sequence[nn.Parameter]]


class FlattenParamsWrapper(flatfsdp.FlattenParamsWrapper):
    """`flatfsdp.FlattenParamsWrapper` with fairscale's names and argument conventions.

    Args:
        module: the module whose parameters are flattened.
        param_list: parameters, or groups of them; they are laid out in the module's order, and empty groups
            are dropped.
        flat_param_names: names of the flat parameters, without the prefix "flat_param_".

    Attributes:
        flat_param_names: names of the flat parameters, with that prefix.
    """

    def __init__(
        self,
        module: nn.Module,
        param_list: ParamGroups | None = None,
        flat_param_names: Sequence[str] | None = None,
    ) -> None:
        if param_list is not None:
            param_list = _in_module_order(module, param_list)
        if flat_param_names is not None:
            flat_param_names = [f"flat_param_{name}" for name in flat_param_names]
        super().__init__(module, param_list, flat_param_names)

    @property
    def flat_param_names(self) -> list[str]:
        """Names of the flat parameters."""
        return list(self._flat_names)

    def metadata(  # type: ignore[override]
        self, flat_param_idx: int
    ) -> tuple[list[str], list[torch.Size], list[int]]:
        """Names, shapes and numels of the distinct parameters in one flat parameter, in address order."""
        described = super().metadata(flat_param_idx)
        shapes = [torch.Size(shape) for shape in described.param_shapes]
        return list(described.param_names), shapes, list(described.param_numels)

    def get_param_views(self, external_data_list: Sequence[Tensor | None] | None = None) -> list[Tensor]:
        """Views like the base class's; None in the list means the flat parameter itself."""
        if external_data_list is None:
            return super().get_param_views()
        pairs = zip(external_data_list, self.flat_params, strict=True)
        return super().get_param_views([own if external is None else external for external, own in pairs])


def _in_module_order(module: nn.Module, param_list: ParamGroups) -> list[list[nn.Parameter]]:
    order = {parameter: i for i, (_, parameter) in reversed(list(enumerate(parameter_sites(module))))}
    is_one_group = any(isinstance(entry, nn.Parameter) for entry in param_list)
    groups = [param_list] if is_one_group else param_list
    # Foreign parameters go last; the base class reports them.
    return [sorted(group, key=lambda p: order.get(p, len(order))) for group in groups if len(group)]  # type: ignore[arg-type]
