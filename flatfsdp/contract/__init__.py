"""The contract between layers, the engine and optimizers, which do not import one another.

They communicate through attributes of parameters and layers, whose names are defined here and nowhere else.
To write a layer you need only this page: a layer of any library that sets or reads these attributes works
inside FlatFSDP.

    attribute                   set by           read by             see
    main_grad, get_main_grad,   engine           layers,             main_grad.py
      claim_main_grad                            optimizers
    __fsdp_param__              engine           Transformer Engine  main_grad.py
    overwrite_main_grad,        Megatron         layers              main_grad.py
      grad_added_to_main_grad
    fp8_operand                 engine           layers              operand.py
    fp8_weights()               layers           engine              operand.py
    packed_parameters()         layers           engine              packed.py
    packed_parts,               engine           layers              packed.py
      _flatfsdp_packed
    late_buffers,               layers           engine,             late_buffers.py
      prepare_load()                             checkpoints
    tensor_model_parallel, partition_dim,        engine,             tensor_parallel.py
      partition_sizes, partition_stride,         optimizers,
      sequence_parallel,        layers           checkpoints
      tensor_parallel_ranks
    exchanges                   layers           engine              tensor_parallel.py
    skip_backward_post_hook     layers           engine              tensor_parallel.py
    flat_shard, viewed_shard    engine           optimizers          flat_shard.py
    whole_shape                 engine           everyone            whole_shape.py
    fsdp_state                  engine           engine              claimed.py
    _flatfsdp_part_of           engine           engine              claimed.py
    _flatfsdp_name(s)           engine           engine, Lightning   claimed.py
    _flatfsdp_owned             engine           engine              claimed.py

`placement.py` reads the tensor-parallel marks for the engine.  Wrappers that add no level to the names
of modules derive from `Transparent` (`transparent.py`).  `foreign_words.py` answers what other engines call
by other names.  `recipe.py` has the FP8 recipes, which layers follow and `Precision` names; `partners.py` the
libraries whose modules need more than others.
"""
