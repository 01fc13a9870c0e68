"""Where parameters live: flat layouts, and their places in a module tree."""
