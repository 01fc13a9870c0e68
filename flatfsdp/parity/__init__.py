"""THE SAME BITS: trains one model twice, with a switch off and on, and compares bit for bit."""

from flatfsdp.parity.switches import ModelSwitch
from flatfsdp.parity.verify import Parity, verify

__all__ = ["ModelSwitch", "Parity", "verify"]
