"""Autograd nodes of layers with linear maps: GEMMs, with the norm or activation before them."""
