"""`Site`: a place in a module tree where a parameter is registered, with its state-dict key.

In:   a module; `Transparent` modules below it add no level to the keys.
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
    """Place where a parameter is registered: `getattr(module, attribute)`.

    `name` is its key in the state dict of the module that was searched, without levels for wrappers.
    """

    module: nn.Module
    attribute: str
    name: str


def parameter_sites(module: nn.Module, prefix: str = "") -> Iterator[tuple[Site, nn.Parameter]]:
    """Yields every place below `module` where a parameter is registered, in state-dict order.

    A tied parameter comes up once for each of its keys, and so does one of a submodule with several paths.
    """
    for path, owner in prefixed_modules(module, prefix):
        for attribute, parameter in owner._parameters.items():
            if parameter is not None:
                yield Site(owner, attribute, path + attribute), parameter


def place(site: Site, tensor: Tensor) -> None:
    """Sets the plain attribute `module.attribute` to `tensor`, beside what is registered under this name."""
    site.module.__dict__[site.attribute] = tensor
    if isinstance(site.module, nn.RNNBase):
        rnn = site.module
        rnn._flat_weights = [getattr(rnn, name, None) for name in rnn._flat_weights_names]
        _follow_flat_weights(rnn)


def assign(site: Site, tensor: Tensor) -> None:
    """Assigns `module.attribute = tensor`, and keeps a recurrent layer's own list of its weights in step."""
    setattr(site.module, site.attribute, tensor)
    if isinstance(site.module, nn.RNNBase):
        # The RNN's __setattr__ has updated `_flat_weights`.
        _follow_flat_weights(site.module)


def _follow_flat_weights(rnn: nn.RNNBase) -> None:
    """Renews the weak references of an RNN to its weights.

    If these are stale, the next forward on CUDA calls `flatten_parameters`, which moves the weights out of
    the flat buffer with `set_()`.
    """
    rnn._flat_weight_refs = [None if w is None else weakref.ref(w) for w in rnn._flat_weights]
