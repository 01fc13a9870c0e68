"""Other engines' interfaces over this one: change an import, keep the program."""
