"""Optimizers for flat shards, and norms of sharded gradients.

Any torch.optim optimizer works on flat shards.  The optimizers here also write, in the same pass, the shard
that is gathered next.
"""

from flatfsdp.contract.flat_shard import FlatShard
from flatfsdp.optim.adamw import AdamW
from flatfsdp.optim.clip import NonFinite, NonFiniteGradientError
from flatfsdp.optim.sgd import SGD

__all__ = ["SGD", "AdamW", "FlatShard", "NonFinite", "NonFiniteGradientError"]
