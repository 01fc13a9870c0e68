"""Predictions of a training step before anything is built: memory, traffic and time."""

from flatfsdp.comm.parallelism import Parallelism
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
    "Parallelism",
    "Sent",
    "TimePlan",
    "memory_plan",
    "search",
    "sent_by_rank",
    "time_plan",
]
