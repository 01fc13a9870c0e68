"""Shows every operator of a step to those who count.

In:   operators, as PyTorch dispatches them, forward, backward and in the optimizer.
Next: `live_memory.py` counts what they allocate, `work.py` how long they take.
"""

from __future__ import annotations

from typing import Any

from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from flatfsdp.flat.nested import tensors_in
from flatfsdp.plan.trace.conditions import Conditions
from flatfsdp.plan.trace.live_memory import LiveMemory
from flatfsdp.plan.trace.places import StepPlace, StepPlaces
from flatfsdp.plan.trace.work import StepWork

_BUILDING = StepPlace("", "build")


class OperatorObserver(TorchDispatchMode):
    """Watches what runs inside.

    Attributes:
        places: None while the model is built.
    """

    def __init__(self, memory: LiveMemory, work: StepWork) -> None:
        super().__init__()
        self._memory = memory
        self._work = work
        self._conditions = Conditions()
        self.places: StepPlaces | None = None

    def __torch_dispatch__(
        self, operator: OpOverload[Any, Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if (answer := self._conditions.answer(operator, args)) is not None:
            return answer
        out = operator(*args, **kwargs)
        self._conditions.note(operator, out)
        place = _BUILDING if self.places is None else self.places.now
        self._memory.see([tensor for tensor in tensors_in(out) if tensor.is_meta], place)
        if self.places is not None:
            self._work.add(operator, args, kwargs, out, place)
        return out
