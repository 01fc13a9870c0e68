"""Runs other projects' tests of their FSDP against `flatfsdp.shard`, from a folder that the user has.

`python -m tests.foreign --help` says how.  Nothing of these projects is kept here, and nothing is written to
their folder:

    files.py      which files, and which tests are in them
    source.py     a file, translated in memory for ranks on the CPU, and for parameters that are no DTensors
    fsdp2.py      what a file of PyTorch's gets for `torch.distributed.fsdp`
    megatron.py   what a file of Megatron's gets for its `experimental` package
    subtests.py   runs one subtest on a rank, and says how it went
    __main__.py   the command: all subtests, a table, and why each failed
"""
