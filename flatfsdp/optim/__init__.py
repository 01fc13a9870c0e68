"""Between reduction and the next forward: norms of sharded gradients, and optimizers.

Any torch.optim optimizer works over flat shards.  These also write the shard that is gathered next, in the
same pass.
"""

from flatfsdp.contract.flat_shard import FlatShard
from flatfsdp.optim.adamw import AdamW
from flatfsdp.optim.sgd import SGD
from flatfsdp.optim.verdict import NonFinite, NonFiniteGradientError

__all__ = ["SGD", "AdamW", "FlatShard", "NonFinite", "NonFiniteGradientError"]
