"""Interfaces of other libraries over this engine: programs change one import, or nothing."""
