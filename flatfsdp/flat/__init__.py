"""Where parameters live: flat layouts, their places in a module tree, and what stands in for modules."""
