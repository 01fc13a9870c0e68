"""Parallelism beside data parallelism."""

from flatfsdp.parallel.clip import clip_grad_norm_
from flatfsdp.parallel.mesh import ParallelMesh, make_mesh
from flatfsdp.parallel.stage import FlatStage
from flatfsdp.rng import RNGTracker, seeded

__all__ = ["FlatStage", "ParallelMesh", "RNGTracker", "clip_grad_norm_", "make_mesh", "seeded"]
