"""What modules of other libraries need when they are sharded; found by the name of their library.

hugging_face         attributes of models that tell of the whole model: dtype, counts, saving, generation
adapters             methods of PEFT's models
transformer_engine   modules of Transformer Engine: dtypes of inputs, FP8 weights that a unit frees

The engine asks `contract/partners.py`, which imports the file here with the first class of the library.
"""
