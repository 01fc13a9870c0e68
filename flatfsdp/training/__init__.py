"""Trainings of the built-in models, whose settings determine every number: for commands and benchmarks."""
