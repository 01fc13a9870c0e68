"""Parameter locations: where a module tree registers them, and the state-dict keys of these places.

In:   a module; modules below it that are `Transparent` have no level in the keys.
Out:  its `Site`s, in state-dict order.
Next: `binding.py` takes parameters out of their sites and puts tensors there.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from flatfsdp.contract.transparent import prefixed_modules


@dataclass(frozen=True)
class Site:
    """One place where a parameter is registered: `getattr(module, attribute)`.

    `name` is its key in the state dict of the module it was looked up from: no level for wrappers.
    """

    module: nn.Module
    attribute: str
    name: str


def parameter_sites(module: nn.Module, prefix: str = "") -> Iterator[tuple[Site, nn.Parameter]]:
    """Every place below `module` where a parameter is registered, in state-dict order.

    A tied parameter comes up once for each of its keys; so does one of a submodule that has several paths.
    """
    for path, owner in prefixed_modules(module, prefix):
        for attribute, parameter in owner._parameters.items():
            if parameter is not None:
                yield Site(owner, attribute, path + attribute), parameter


def place(site: Site, tensor: Tensor) -> None:
    """Makes `module.attribute` be `tensor`, beside what the module has registered under this name."""
    site.module.__dict__[site.attribute] = tensor
    if isinstance(site.module, nn.RNNBase):
        rnn = site.module
        rnn._flat_weights = [getattr(rnn, name, None) for name in rnn._flat_weights_names]
        _follow_flat_weights(rnn)


def assign(site: Site, tensor: Tensor) -> None:
    """`module.attribute = tensor`, and a recurrent layer's own list of its weights stays in step."""
    setattr(site.module, site.attribute, tensor)
    if isinstance(site.module, nn.RNNBase):
        # Its __setattr__ has updated `_flat_weights`.
        _follow_flat_weights(site.module)


def _follow_flat_weights(rnn: nn.RNNBase) -> None:
    """Renews the weak references of an RNN to its weights.

    If they lag behind `_flat_weights`, the next forward on CUDA calls `flatten_parameters`, which moves the
    weights out of the flat buffer with `set_()`.
    """
    rnn._flat_weight_refs = [None if w is None else weakref.ref(w) for w in rnn._flat_weights]
