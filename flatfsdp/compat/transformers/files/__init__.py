"""Files of Hugging Face for models that are sharded: no rank ever has the whole model.

load      `load_hf`: every rank reads its own part of each tensor
save      `save_hf`: the first rank writes one unit after the other
names     what parameters are called in files
folder    safetensors files and their index, read and written
"""
