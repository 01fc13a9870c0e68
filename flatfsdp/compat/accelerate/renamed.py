"""`Renamed`: gives optimizers made before their model was sharded this rank's parts to update.

In:   the parameters of a model, before and after it was sharded; optimizers, made at any time.
Out:  the same optimizers, with the same groups and options.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from flatfsdp.contract.claimed import TAKEN_AS
from flatfsdp.engine.guards.optimizers import watch


class Renamed:
    """Maps each parameter that a model had to the shard that replaced it.

    Whole parameters stay in memory only as long as an optimizer holds them.
    """

    def __init__(self) -> None:
        self._parts = WeakTensorKeyDictionary()

    def note(self, before: Mapping[str, nn.Parameter], after: Mapping[str, nn.Parameter]) -> None:
        """Records a sharded model: its parameters by name, before and after."""
        for name, parameter in before.items():
            self._parts[parameter] = after[name]

    def hand_to(self, optimizer: torch.optim.Optimizer) -> None:
        """Replaces whole parameters in an optimizer by this rank's parts.

        Raises:
            ValueError: if it has state of whole parameters, or a parameter of a model that was sharded
                elsewhere; if it needs whole parameters.  The optimizer is unchanged then.
        """
        require_without_state(optimizer, self._parts)
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        for name in (TAKEN_AS.of(each) for each in parameters if each not in self._parts):
            if name is not None:
                raise ValueError(
                    f"the optimizer has parameter {name} of a model that was sharded after the optimizer was "
                    "made; make it of model.parameters() after flatfsdp.shard, or leave sharding to prepare"
                )
        whole = [group["params"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["params"] = [self._parts.get(each, each) for each in group["params"]]
        try:
            watch(optimizer)
        except ValueError:
            for group, parameters in zip(optimizer.param_groups, whole, strict=True):
                group["params"] = parameters
            raise


def require_without_state(optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter]) -> None:
    """Checks that an optimizer has no state yet for these parameters, which are to be sharded.

    Raises:
        ValueError: if it has.
    """
    # `get`, because the state may be a defaultdict, which must not grow.
    if any(optimizer.state.get(each) for each in parameters):
        raise ValueError(
            f"this {type(optimizer).__name__} has state of whole parameters, from steps or a state dict "
            "before the model was sharded; prepare model and optimizer first, then load: "
            "accelerator.load_state, or flatfsdp.checkpoint.load_full_optimizer_state_dict"
        )
