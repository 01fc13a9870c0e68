"""Measurements of a step: traces, timelines, and bytes counted from outside the engine."""
