"""THE SAME BITS: one model trained twice, with a switch off and on, and compared bit for bit."""

from flatfsdp.parity.switches import ModelSwitch
from flatfsdp.parity.verify import Parity, verify

__all__ = ["ModelSwitch", "Parity", "verify"]
