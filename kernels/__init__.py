"""Numerical operations of FlatFSDP, one file per operation; installed as `flatfsdp.kernels`."""
