"""Tensor and pipeline parallelism beside data parallelism: meshes, random numbers, stages and clipping."""

from flatfsdp.comm.mesh import ParallelMesh, make_mesh
from flatfsdp.comm.rng import RNGTracker, seeded
from flatfsdp.parallel.clip_stages import clip_grad_norm_
from flatfsdp.parallel.stage import FlatStage

__all__ = ["FlatStage", "ParallelMesh", "RNGTracker", "clip_grad_norm_", "make_mesh", "seeded"]
