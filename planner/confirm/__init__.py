"""A plan's candidates run on the machine, next to their predictions."""
