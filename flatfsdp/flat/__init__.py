"""Flat layouts of parameters, their sites in a module tree, and wrappers that keep parameters flat."""
