"""The step: when parameters are gathered, gradients reduced, and a backward ends."""
