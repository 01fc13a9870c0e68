"""Lightning's interfaces: of Fabric, whose names are here as well, and of its Trainer.

fabric.py    FlatFSDPStrategy for `Fabric(strategy=...)`
trainer.py   FlatFSDPStrategy for `Trainer(strategy=...)`
shared.py    what the two have in common
"""

from flatfsdp.compat.lightning.fabric import Fabric, FlatFSDPStrategy

__all__ = ["Fabric", "FlatFSDPStrategy"]
