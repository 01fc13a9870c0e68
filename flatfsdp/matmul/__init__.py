"""The three GEMMs of a linear map, in FP8 or not, and what ranks exchange around them."""
