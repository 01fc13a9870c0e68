"""Other libraries' interfaces over this engine: change an import, or nothing, and keep the program."""
