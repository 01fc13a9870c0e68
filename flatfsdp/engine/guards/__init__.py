"""Guards: each refuses one way of breaking a sharded model from outside, at the call that would do it.

other_engines   a second engine around the model, or inside it; adapters that take parameters away
optimizers      optimizers that hold the wrong tensors, or need whole parameters; states of other ranks
modules         parameters added below a unit; calls all guards from PyTorch hooks, which see all modules and
                optimizers of the process
"""
