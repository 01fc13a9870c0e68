"""`ShardGrad`: a rank's part of a gradient, which asks other ranks where its own part cannot answer.

In:   a reduced gradient, as long as the master shard (`Published`).
Out:  a `ShardGrad` in `.grad` of the flat parameter, or of each local shard, in the same memory.
Next: `torch.nn.utils.clip_grad_norm_`, loggers and `GradScaler` ask it; `grad_norms.py` answers over ranks.

    flat gradient   | slot 0 .......|gap| slot 1 ....................|     kept alive by its parts alone
    .grad             ShardGrad           ShardGrad

A `ShardGrad`, and any result of the same shape that is computed from it (`p.grad / n`, `.detach()`), knows
which parameter it belongs to:

    norms                                        are those of the whole gradient, over all ranks
    _amp_foreach_non_finite_check_and_unscale_   shows non-finite values of any rank on all ranks
    max, min, amax, amin                         raise on all ranks, as ranks without elements would
    anything else                                uses this rank's elements and gives a plain tensor
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor


@dataclass(eq=False)
class ShardInModel:
    """A master shard, as its gradients know it.

    Attributes:
        answers: the `NormsOverRanks` of the model that the shard is in, which knows all its shards and asks
            other ranks about gradients; None before the model is used.
        number: number of the shard in the model, the same on all ranks.
    """

    answers: Any = None
    number: int = 0

    @property
    def norms(self) -> Any:
        """What asks the ranks of the model.

        Raises:
            RuntimeError: before the model is used.
        """
        if self.answers is None:
            raise RuntimeError(
                "a gradient was asked for its norm before the model's first forward, in which ranks agree on "
                "who has the other parts; run a forward first"
            )
        return self.answers


class Place(NamedTuple):
    """Whose gradient a tensor is.

    Attributes:
        shard: the master shard of the parameter.
        number: number of the parameter's local shard in it.
    """

    shard: ShardInModel
    number: int


@dataclass(eq=False)
class Published:
    """One reduced gradient, as long as the master shard; it lives as long as one of its parts does.

    Attributes:
        flat: the gradient; zero in idle local shards.
        idle: numbers of the local shards that no rank has used, and that have no gradient.
    """

    flat: Tensor
    idle: set[int]


_DATA: Any = Tensor.data
_BASE: Any = Tensor._base

_NORMS = (torch.linalg.vector_norm, torch.linalg.norm, torch.norm, Tensor.norm)
_EXTREMES = [getattr(where, name) for where in (torch, Tensor) for name in ("max", "min", "amax", "amin")]
_ZEROING = (Tensor.zero_, torch._foreach_zero_)
_LIKE = ("empty", "zeros", "ones", "full", "rand", "randn", "randint")
_NEW = ("empty", "empty_strided", "full", "ones", "tensor", "zeros")
_ORDINARY = frozenset(
    [Tensor.as_subclass, torch.clone, Tensor.clone, _BASE.__get__]
    + [getattr(torch, f"{kind}_like") for kind in _LIKE]
    + [getattr(Tensor, f"new_{kind}") for kind in _NEW]
)
"""Functions whose results belong to no parameter.  If what an optimizer makes of a gradient did, its state
would ask other ranks; if `_base` did, it would be a view with a base itself, and so on without end."""


class ShardGrad(Tensor):
    """This rank's part of the gradient of one parameter, or of a whole flat one: 1-D, perhaps empty.

    Attributes:
        place: the parameter that it is the gradient of.
        published: the reduced gradient that this is a part of, in the same memory; None for computed results.
        answer: what its norm is known for, and the norm, if that was taken with others and has not been
            asked for yet; see `NormsOverRanks`.
        zeroings: number of times it was zeroed.
        is_autograds: whether autograd has made it, where there was no gradient (see `unreduced.py`).
        stands_for_none: whether it is the zeros that `zero_grad(set_to_none=False)` put in place of a marker.
    """

    place: Place
    published: Published | None = None
    answer: tuple[tuple[float, int, int], Tensor] | None = None
    zeroings: int = 0
    is_autograds: bool = False
    stands_for_none: bool = False

    @staticmethod
    def of(part: Tensor, place: Place, published: Published | None = None) -> ShardGrad:
        """Marks a part of a reduced gradient as the gradient of a shard."""
        grad = part.as_subclass(ShardGrad)
        grad.place, grad.published = place, published
        return grad

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _NORMS and isinstance(args[0], ShardGrad):
            return _norm(func, args[0], args[1:], kwargs)
        if func is torch._foreach_norm:
            return _norms(*args, **kwargs)
        if func in _EXTREMES and not any(isinstance(a, Tensor) for a in (*args[1:], kwargs.get("other"))):
            raise ValueError(
                f"{func.__name__} of this rank's part of a gradient; use .grad.norm(torch.inf) for the "
                "largest magnitude over all ranks, or .grad.as_subclass(torch.Tensor) for this rank's "
                "elements"
            )
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
            if func is torch._amp_foreach_non_finite_check_and_unscale_:
                for norms in dict.fromkeys(grad.place.shard.norms for grad in _shard_grads(args[:1])):
                    norms.share_nonfinite(args[1])
            elif func in _ZEROING:
                for grad in _shard_grads(args):
                    grad.zeroings += 1
            elif func == _DATA.__get__:
                args[0].place.shard.norms.forget()
            # A list of tensors that were written in place is an argument, such as an optimizer's moments.
            is_argument = type(result) in (list, tuple) and func.__name__.endswith("_")
            return result if func in _ORDINARY or is_argument else _of_the_same_place(result, args)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """Copies to an ordinary tensor, which belongs to no parameter."""
        return copy.deepcopy(plain(self), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return plain(self).__reduce_ex__(protocol)


def plain(grad: Tensor) -> Tensor:
    """An ordinary tensor in the same memory."""
    return grad.as_subclass(Tensor) if isinstance(grad, ShardGrad) else grad


def _shard_grads(values: Any) -> Iterator[ShardGrad]:
    """Yields the `ShardGrad`s among arguments, also those in lists."""
    for value in values:
        if isinstance(value, ShardGrad):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _shard_grads(value)


def _of_the_same_place(result: Any, args: Sequence[Any]) -> Any:
    """Marks a result computed from a gradient with the same parameter, if it could replace the gradient."""
    if args and type(result) in (list, tuple):
        # torch._foreach_mul(grads, 0.5)
        n = len(result)
        columns = [arg if isinstance(arg, (list, tuple)) and len(arg) == n else [arg] * n for arg in args]
        return type(result)(map(_of_the_same_place, result, zip(*columns, strict=True)))
    if type(result) is not Tensor or not result.is_floating_point():
        return result
    source = next((grad for grad in _shard_grads(args) if grad.shape == result.shape), None)
    return result if source is None else ShardGrad.of(result, source.place)


def _norm(func: Any, grad: ShardGrad, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """Norm of one whole gradient; for a 1-D tensor, a norm along its dimension is the norm."""
    options = dict(zip(("p", "dim", "keepdim"), args, strict=False)) | dict(kwargs)
    order, dim = options.get("p", options.get("ord", 2.0)), options.get("dim")
    norm_type = 2.0 if order in (None, "fro") else float(order)
    dims = (dim,) if isinstance(dim, int) else dim or ()
    if not norm_type > 0 or any(each not in (0, -1) for each in dims) or options.get("out") is not None:
        raise ValueError(
            f"{func.__name__} of order {order!r}, dim {dim!r} of a gradient of which this rank has a part: "
            "norms of positive order of all elements, without out=, are known over all ranks; use "
            ".grad.as_subclass(torch.Tensor) for those of the part, which is 1-D"
        )
    norm: Tensor = grad.place.shard.norms.norm(grad, norm_type)
    norm = norm.to(options.get("dtype") or norm.dtype)
    return norm.reshape(1) if options.get("keepdim") else norm


def _norms(tensors: Sequence[Tensor], ord: float = 2.0, dtype: torch.dtype | None = None) -> Sequence[Tensor]:
    """Computes `torch._foreach_norm` of gradients and other tensors."""
    return [torch.linalg.vector_norm(tensor, ord, dtype=dtype) for tensor in tensors]
