"""Sharding that leaves a module's class, names and methods as they are."""
