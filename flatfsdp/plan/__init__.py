"""Predictions of a training step before anything is built: memory, traffic and time."""

from flatfsdp.comm.parallelism import Parallelism
from flatfsdp.plan.advice import Advice, advise
from flatfsdp.plan.job import Job, Model
from flatfsdp.plan.machine import Machine
from flatfsdp.plan.memory import StepMemory
from flatfsdp.plan.plan import Plan, plan
from flatfsdp.plan.search import search
from flatfsdp.plan.time import Sent, StepTime, UnitPlan

__all__ = [
    "Advice",
    "Job",
    "Machine",
    "Model",
    "Parallelism",
    "Plan",
    "Sent",
    "StepMemory",
    "StepTime",
    "UnitPlan",
    "advise",
    "plan",
    "search",
]
