"""Predictions of a training step before anything is built: memory, traffic and time."""

from flatfsdp.comm.parallelism import Parallelism
from flatfsdp.plan.any_model import ModelPlan, UnitPlan, plan_model
from flatfsdp.plan.job import Job
from flatfsdp.plan.machine import Machine
from flatfsdp.plan.memory import MemoryPlan, memory_plan
from flatfsdp.plan.search import Candidate, search
from flatfsdp.plan.time import TimePlan, time_plan
from flatfsdp.plan.traffic import Sent, sent_by_rank

__all__ = [
    "Candidate",
    "Job",
    "Machine",
    "MemoryPlan",
    "ModelPlan",
    "Parallelism",
    "Sent",
    "TimePlan",
    "UnitPlan",
    "memory_plan",
    "plan_model",
    "search",
    "sent_by_rank",
    "time_plan",
]
