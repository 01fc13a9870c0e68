"""Figures of a training run: its speed while it trains, and the GPU's time during one step.

metrics.py     `Metrics`: tokens per second, MFU, memory, replayed microbatches, data loading
logs.py        figures as lines of JSON, in TensorBoard, in Weights & Biases
step_time.py   `breakdown`: kernels of a profiled step by class; figures as JSON
"""

from flatfsdp.profiling.logs import LogName, open_logs, require_logs
from flatfsdp.profiling.metrics import Metrics
from flatfsdp.profiling.step_time import breakdown, spans_of

__all__ = ["LogName", "Metrics", "breakdown", "open_logs", "require_logs", "spans_of"]
