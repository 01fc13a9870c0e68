"""Plans of any model: a step of the engine itself runs on the meta device, and is counted.

ranks.py          a process group of any size that only pretends
attention.py      attention as a GPU keeps it
gpu_functions.py  which functions run as on a GPU
on_meta.py        a model that was built with memory
places.py         which unit runs, forward or backward
live_memory.py    bytes that are allocated now, and at most
work.py           seconds that a GPU needs for each operator
conditions.py     what a condition on values comes to
observer.py       shows each operator to those above
step.py           a few steps of one rank
plan.py           what comes of it: `plan_model` and its `ModelPlan`
"""

from flatfsdp.plan.any_model.plan import ModelPlan, UnitPlan, plan_model

__all__ = ["ModelPlan", "UnitPlan", "plan_model"]
