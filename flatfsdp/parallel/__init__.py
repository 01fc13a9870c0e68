"""Parallelism beside data parallelism."""

from flatfsdp.parallel.stage import FlatStage

__all__ = ["FlatStage"]
