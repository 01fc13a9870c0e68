"""Parallelism beside data parallelism."""

from flatfsdp.parallel.mesh import ParallelMesh, make_mesh
from flatfsdp.parallel.stage import FlatStage
from flatfsdp.rng import RNGTracker, seeded

__all__ = ["FlatStage", "ParallelMesh", "RNGTracker", "make_mesh", "seeded"]
