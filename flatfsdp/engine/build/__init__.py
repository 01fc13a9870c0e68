"""How a module becomes a unit: which parameters it takes, and into which flat groups they go."""
