"""Collective launches that carry their purpose, so that ranks which do different things raise."""
