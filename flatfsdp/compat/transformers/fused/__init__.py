"""Models of transformers that our kernels compute, under their own modules, names and checkpoints.

fuse                          finds what can be computed, and says what it leaves; `unfuse`
families, why_not, probe      which models there are; why a part is left alone; a numerical comparison
model, layer, half            what calls what: the model's forward, a layer's, and what its halves share
attention, mlp, head, small   the parts: attention, perceptron, head and loss, norms and embeddings
operands, fused_part, lora    weights that are one operand; what all parts have; adapters on them
"""
