"""Files of Hugging Face for models that are sharded: no rank ever has the whole model.

load           `load_hf`: every rank reads its own part of each tensor
save           `save_hf`: the first rank writes one unit after the other
names          what parameters are called in files
conversions    what transformers has in another form there
folder         safetensors files and their index, read and written
together       ranks that begin together, and learn of each other's errors
"""
