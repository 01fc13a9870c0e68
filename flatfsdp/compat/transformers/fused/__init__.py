"""Computation of transformers' models by our kernels, with unchanged modules, names and checkpoints.

fuse                          finds the parts to fuse, and logs what it leaves out; `unfuse`
families, why_not, probe      known models; why a part is left to transformers; a numerical comparison
model, layer, half            the model's forward, a layer's, and the base of its halves
attention, mlp, head, small   attention, MLP, head and loss, norms and embeddings
fused_part, lora              base of all parts; adapters
"""
