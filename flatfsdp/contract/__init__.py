"""What layers and the engine promise each other; neither imports the other."""
