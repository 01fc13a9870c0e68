"""THE SAME BITS: trains one model twice, with a switch off and on, and compares bit for bit."""

from flatfsdp.parity.switches import Switch
from flatfsdp.parity.verify import Comparison, Parity, verify

__all__ = ["Comparison", "Parity", "Switch", "verify"]
