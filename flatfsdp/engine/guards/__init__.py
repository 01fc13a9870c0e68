"""What must not happen to a sharded model from outside is refused, where it happens.

other_engines   a second engine around the model, or inside it
late_modules    parameters that come below a unit after it was built
optimizers      those that hold the wrong tensors, or that need whole ones
watch           calls them: from hooks of PyTorch, which see all modules and optimizers of the process
"""
