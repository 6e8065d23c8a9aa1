"""TODO docstring of the package."""
