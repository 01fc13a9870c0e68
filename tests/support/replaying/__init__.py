"""Trainings whose microbatches may be replayed."""
