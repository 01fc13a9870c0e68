"""The three GEMMs of a linear map, in FP8 or not, and the tensor-parallel communication around them."""
