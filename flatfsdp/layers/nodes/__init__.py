"""The autograd nodes of layers with linear maps: products, with the norm or activation before them."""
