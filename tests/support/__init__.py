"""What tests share.

How they run:
    ranks               a test, or a case, on several ranks, which live for the whole run
    selection           what `make test` leaves out: cases of cross products, kernels that have passed
    programs            Python programs, as a user runs them
    gpu/                which GPUs a test needs, and a watch over the host
    kernels/            kernels without a GPU: interpreted, or compiled for Hopper
    stress/, diverging/ random models trained in random ways, and with a rank that does something else

Models, their data and their training:
    models              a small language model in FlatFSDP, what its training leaves, whether that is the same
    against_plain       the gradients of the plain model, and what FlatFSDP has in memory
    lanes               layouts of ranks whose trainings have the same bits, and their data
    tp_models           a tensor-parallel model made by hand
    llamas, pipelines   a Llama, and a model in stages: with any ranks a dimension, or in one process
    fp8_layers          a model of FP8 layers on one process; fp8_training: over ranks
    stored_weights      the same with weights that FlatFSDP stores in FP8
    split_layers        a layer that ranks share against the same one on one process, and its traffic
    checkpoints         a model to save, the forms to save it in, whether two states are equal
    flatten_models      models for FlattenParamsWrapper
    fairscale_programs  programs written for fairscale, which also run with ours

What is expected:
    plain_layers        the layers' formulas in plain PyTorch and FP64, and `error`, how far off a result is
    plain_attention     the same for MultiheadAttention
    published           the README and the results that are committed with it
"""
