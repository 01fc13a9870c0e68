"""Parallelism beside data parallelism."""

from flatfsdp.parallel.stage import FlatStage
from flatfsdp.rng import RNGTracker, seeded

__all__ = ["FlatStage", "RNGTracker", "seeded"]
