"""Lightning's interfaces: Fabric's, also exported here, and the Trainer's.

fabric.py    FlatFSDPStrategy for `Fabric(strategy=...)`
trainer.py   FlatFSDPStrategy for `Trainer(strategy=...)`
"""

from flatfsdp.compat.lightning.fabric import Fabric, FlatFSDPStrategy

__all__ = ["Fabric", "FlatFSDPStrategy"]
