"""Flat layouts of parameters, their places in a module tree, and what stands in for modules."""
