"""Launches that carry what they are for, so that ranks which do different things raise."""
