"""Hugging Face files of sharded models: no rank ever has the whole model.

load           `load_hf`: every rank reads its own part of each tensor
save           `save_hf`: the first rank writes one unit after the other
names          names of parameters in files
conversions    tensors that transformers stores in another form in files
folder         safetensors files and their index, read and written
together       collective begin of a load or save, and errors raised on all ranks
"""
