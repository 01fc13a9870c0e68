"""`Renamed`: optimizers that were made before their model was sharded update this rank's parts.

In:   the parameters of a model, before and after it was sharded; optimizers, made at any time.
Out:  the same optimizers, with the same groups and options.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from flatfsdp.contract.claimed import TAKEN_AS


class Renamed:
    """What stands in the place of each parameter that a model had.

    Of whole parameters only those are kept in memory that an optimizer still has.
    """

    def __init__(self) -> None:
        self._parts = WeakTensorKeyDictionary()

    def note(self, before: Mapping[str, nn.Parameter], after: Mapping[str, nn.Parameter]) -> None:
        """Remembers a model that has been sharded: its parameters by name, then and now."""
        for name, parameter in before.items():
            self._parts[parameter] = after[name]

    def hand_to(self, optimizer: torch.optim.Optimizer) -> None:
        """Gives an optimizer the parts of what it has.

        Raises:
            ValueError: if it has state of whole parameters, or a parameter of a model that somebody else has
                sharded.  It is as it was then.
        """
        require_without_state(optimizer, self._parts)
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        for name in (TAKEN_AS.of(each) for each in parameters if each not in self._parts):
            if name is not None:
                raise ValueError(
                    f"the optimizer has parameter {name} of a model that was sharded after the optimizer was "
                    "made; make it of model.parameters() after flatfsdp.shard, or leave sharding to prepare"
                )
        for group in optimizer.param_groups:
            group["params"] = [self._parts.get(each, each) for each in group["params"]]


def require_without_state(optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter]) -> None:
    """Checks that an optimizer has not yet updated these parameters, which are to be sharded.

    Raises:
        ValueError: if it has.
    """
    # Its state may be a defaultdict, which is not to grow.
    if any(optimizer.state.get(each) for each in parameters):
        raise ValueError(
            f"this {type(optimizer).__name__} has state of whole parameters, from steps or a state dict "
            "before the model was sharded; prepare model and optimizer first, then load: "
            "accelerator.load_state, or flatfsdp.checkpoint.load_full_optimizer_state_dict"
        )
